"""Prompts computed once: keys, values and next-token logits, while requests in flight need them.

Called by the local engine and its runner. Floor 2. An entry contains the version of the weights
that made it, so it can never serve others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PromptIds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prefilled:
    """B sequences that went through the model together, padded at their end to T tokens."""

    kv_L2BKTE: Tensor
    logits_BV: Tensor
    """Logits of the token after each sequence."""


class PrefixStore:
    """Prefilled prompts, kept while requests in flight have that prompt."""

    def __init__(self) -> None:
        self._users: Counter[PromptIds] = Counter()
        self._entries: dict[PromptIds, tuple[int, Prefilled, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, prompt: PromptIds) -> None:
        """A request with this prompt has come in flight."""
        self._users[prompt] += 1

    def release(self, prompt: PromptIds) -> None:
        """A request with this prompt has ended; after the last one the entry goes."""
        self._users[prompt] -= 1
        if not self._users[prompt]:
            del self._users[prompt]
            self._entries.pop(prompt, None)

    def missing(self, prompts: Sequence[PromptIds], *, version: int) -> list[PromptIds]:
        """Those without an entry of this version, each once, in order."""
        return [p for p in dict.fromkeys(prompts) if self._entries.get(p, (None,))[0] != version]

    def put(self, prompts: Sequence[PromptIds], batch: Prefilled, *, version: int) -> None:
        """Row i of `batch` is prompts[i], computed with weights `version`."""
        for row, prompt in enumerate(prompts):
            self._entries[prompt] = (version, batch, row)

    def get(self, prompt: PromptIds, *, version: int) -> tuple[Prefilled, int]:
        """The batch that holds the prompt, and its row there."""
        made_by, batch, row = self._entries[prompt]
        assert made_by == version, f"prefix of version {made_by} asked for at version {version}"
        return batch, row

    def clear(self) -> None:
        """Drop every entry: the weights are about to change."""
        self._entries.clear()
