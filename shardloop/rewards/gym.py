"""The scorer of the reasoning-gym generator that asked the question. Floor 1.

Named in `rewards.REWARDS`; needs the extra `shardloop[gym]`.
"""

from shardloop.tasks.gym import gym_dataset
from shardloop.types import Prompt


def gym_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """The generator's own score in [0, 1] of a finished answer; some give partial credit.

    `prompt.answer` is {"generator": ..., "index": ...}, from which the entry is made again.
    """
    if not finished:
        return 0.0
    dataset = gym_dataset(prompt.answer["generator"])
    return float(dataset.score_answer(text.strip(), dataset[prompt.answer["index"]]))
