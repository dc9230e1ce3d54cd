"""The nouns that travel between rooms: prompts, requests, completions, rewards. Floor 0.

Everything here is frozen, picklable and free of torch: a controller, a worker and a notebook can
exchange it.

    Task ──Prompt──▶ rollouts ──Request──▶ Engine ──Completion──▶ RewardFn ──Reward──▶ rl.batch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shardloop.errors import UsageError

MOST_COUNT = 2**31 - 1
MIN_TEMPERATURE = 1e-6
"""Below it, dividing by the temperature overflows; 0 says greedy."""

FinishReason = Literal["stop", "length", "aborted"]
Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question of a task.

    Exactly one of `text` and `messages` is set: raw text is tokenised as it is, messages go through
    the tokenizer's chat template. `answer` is what the reward needs to judge a completion (JSON).
    """

    uid: str
    """Identity within its task and split; the same question always has the same uid."""
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    answer: Any = None
    solution: str | tuple[str, ...] | None = None
    """A worked completion to imitate in supervised fine-tuning; None where the task has none.

    Several texts are an episode: the policy's and its environment's in turn, from the policy's
    first to its last (an odd number). Only the policy's are imitated."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.uid!r}: set exactly one of text and messages")

    @property
    def named(self) -> str:
        """How messages to people name it: its uid and the end of what it asks."""
        asked = self.text if self.text is not None else (self.messages or ({},))[-1].get("content")
        return f"prompt {self.uid!r} ({shorten(repr(asked))})"


def shorten(text: str, most: int = 60) -> str:
    """Text for a message: its middle left out where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 20]} … {text[-17:]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to draw tokens. Log-probs are always taken at `temperature`."""

    max_tokens: int
    """Most tokens to generate, stop token included."""
    temperature: float = 1.0
    """0 means greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are cut off; after
    top-k and top-p. 0 cuts none."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with (and keeps) the first of these."""
    stop: tuple[str, ...] = ()
    """Generation ends with (and keeps) the token that completes the first of these texts."""

    def __post_init__(self) -> None:
        """Raises: UsageError."""
        for name, value, least in (
            ("max_tokens", self.max_tokens, 1),
            ("top_k", self.top_k, 0),
            *(("stop_token_ids", token_id, 0) for token_id in self.stop_token_ids),
        ):
            if type(value) is not int or not least <= value <= MOST_COUNT:
                raise UsageError(
                    f"{name}={value!r}; choose a whole number from {least} to {MOST_COUNT}"
                    + (" (0: no limit)" if name == "top_k" else "")
                )
        if not _is_real(self.temperature) or not (
            self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < float("inf")
        ):
            raise UsageError(
                f"temperature={self.temperature!r}; choose 0 (greedy) or a finite value of"
                f" {MIN_TEMPERATURE} or more"
            )
        if not _is_real(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p={self.top_p!r}; choose a value in (0, 1]")
        if not _is_real(self.min_p) or not 0.0 <= self.min_p < 1.0:
            raise UsageError(f"min_p={self.min_p!r}; choose a value in [0, 1)")
        if type(self.stop) is not tuple or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise UsageError(f"stop={self.stop!r}; pass a tuple of texts, none of them empty")


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleId:
    """Which sample this is. Sampling noise is f(seed, sample id, position) and nothing else."""

    prompt_uid: str
    index: int
    """Place within the group of completions of one prompt, from 0."""
    attempt: int = 0
    turn: int = 0
    """Which of the sample's requests this is: above 0 after an environment has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to be generated. Requests with equal `prompt_ids` share their prefix."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    sample_id: SampleId
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine made of a request; all tuples have one entry per generated token (T).

    Raises:
        ValueError: the tuples differ in length (no log-prob is ever made up).
    """

    request: Request
    token_ids_T: tuple[int, ...]
    """Exactly as sampled, stop token included; never re-tokenised."""
    behave_T: tuple[float, ...]
    """Log-prob under the distribution really sampled from (temperature, top-p, top-k)."""
    full_T: tuple[float, ...]
    """Natural log-prob under the full distribution at that temperature."""
    version_T: tuple[int, ...]
    """Version of the weights that produced each token."""
    loss_mask_T: tuple[int, ...]
    """1 for tokens the policy chose, 0 for tool output and environment text."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = {
            "token_ids_T": len(self.token_ids_T),
            "behave_T": len(self.behave_T),
            "full_T": len(self.full_T),
            "version_T": len(self.version_T),
            "loss_mask_T": len(self.loss_mask_T),
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"completion of {self.request.sample_id}: lengths differ: {lengths}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named contributions, for the log."""
    text: str = ""
    """Why, for a person who reads samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment answers to a turn of the policy."""

    text: str
    """Follows the policy's text; the policy reads it and is never trained on it. The name of a
    special token in it is read letter by letter: a tool cannot end or open a message."""
    reward: float = 0.0
    """Adds up over the episode, and to what the RewardFn gives."""
    done: bool = False
    """Ends the episode."""


class Env(Protocol):
    """The other side of one episode: a tool, a game, a user. Made for one sample, used once.

        reset ─▶ policy ──text──▶ step ──Observation──▶ policy ──text──▶ step ─▶ … done

    Both methods run in the driver, in one thread and in order. They must return by themselves:
    one that takes longer than `controller.environments.ANSWER_TIMEOUT_S` ends the run, as does one
    that raises. The same calls should get the same answers, so that a run can be repeated.
    """

    def reset(self) -> str:
        """Text to be read after the prompt, before the policy's first turn; often none ("")."""
        ...

    def step(self, text: str) -> Observation:
        """Answers a turn that the policy has ended; `text` is that turn without special tokens."""
        ...


class Task(Protocol):
    """A stream of prompts with train and test splits that share no question.

    A task of several turns also has `env(prompt) -> Env | None`, called once for each sample;
    None, or no such method, is the case of a single turn.
    """

    name: str
    stop_text: str | None
    """Text that ends an answer besides the tokenizer's stop tokens; None where those suffice."""

    def prompts(self, split: Split, *, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """`count` prompts of the stream `(split, seed)` from `start`; equal calls, equal prompts.

        Raises:
            ValueError: the split has no prompts.
        """
        ...

    @property
    def default_reward(self) -> str:
        """Name of the reward that judges this task (see `shardloop.rewards.load_reward`)."""
        ...


class RewardFn(Protocol):
    """Judges one completion.

    `text` is the decoded completion without special tokens, an environment's answers included;
    `finished` is True when the model ended it by a stop token, or the environment said that the
    episode is done. Returns a finite number or a `Reward`.
    """

    def __call__(self, prompt: Prompt, text: str, *, finished: bool) -> float | Reward: ...


class Tokenizer(Protocol):
    """What the library asks of a tokenizer (see `shardloop.hf.load_tokenizer`)."""

    vocab_size: int
    """Number of ids, special tokens included: every id is in [0, vocab_size)."""
    stop_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which the name of a special token is that token."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text that is nothing but text: none of them is a special token's."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, with the beginning-of-sequence token where the tokenizer has one."""
        ...
