"""For tasks whose environment is the judge. Floor 1; named in `rewards.REWARDS`."""

from shardloop.types import Prompt


def env_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """0: what the environment gave in the episode, which is added to this, is the whole reward."""
    return 0.0
