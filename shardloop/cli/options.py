"""Options that `shardloop eval`, `shardloop generate` and `shardloop sft` share. Floor 5."""

from dataclasses import dataclass, field

import tyro

from shardloop.config import EngineConfig, Sleep, WorkersConfig
from shardloop.errors import UsageError
from shardloop.tasks import Stops
from shardloop.types import Sampling


@dataclass(frozen=True, kw_only=True)
class EngineAlone(EngineConfig):
    """How the engine is cut and sized."""

    layout: str = "engine:tp=1"
    """Layout of the engine's ranks: engine:tp=N, or engine:replicas=R,tp=N."""
    sleep: tyro.conf.Suppress[Sleep] = "never"


@dataclass(frozen=True, kw_only=True)
class WorkersAlone(WorkersConfig):
    """The processes of the ranks."""

    colocate: tyro.conf.Suppress[bool] = False


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """A model, how its completions are drawn, and where the engine runs."""

    model: str
    """A built-in model (tiny, smollm2) or a Llama, Qwen2 or Qwen3 folder (Hugging Face format)."""
    max_tokens: int = 16
    """Most tokens of a completion, stop token included."""
    temperature: float = 0.0
    """0 takes the likeliest token each time (greedy)."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest, in [0, 1); 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the tokenizer's own and the task's."""
    seed: int = 0
    """Seed of the sampling noise."""
    engine: EngineAlone = field(default_factory=EngineAlone)
    workers: WorkersAlone = field(default_factory=WorkersAlone)

    def sampling(self, stops: Stops) -> Sampling:
        """
        Args:
            stops: what ends an answer besides the option `stop`.
        Raises:
            UsageError: a value that no sampling can have.
        """
        try:
            return Sampling(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                stop_token_ids=stops.token_ids,
                stop=tuple(dict.fromkeys((*stops.texts, *self.stop))),
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
