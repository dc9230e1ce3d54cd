"""Ragged, prefix-shared loads: groups of completions of random prompts, with lognormal lengths."""

from dataclasses import dataclass

import torch

from benchmarks.models import NUM_SPECIAL
from shardloop.types import Request, SampleId, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a benchmark asks for; the same arguments give the same load."""

    prompts: int
    samples: int
    """Completions of each prompt, which share it."""
    prompt_tokens: int
    median: int
    """Of the completions' lengths, before the cap."""
    sigma: float
    """Spread of the logarithm of the lengths."""
    cap: int
    vocab: int
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return self.prompts * self.samples

    def prompt_ids(self) -> list[tuple[int, ...]]:
        """One tuple of ids for each prompt, none of them special."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.prompts, self.prompt_tokens)
        ids = torch.randint(NUM_SPECIAL, self.vocab, shape, generator=generator)
        return [tuple(row) for row in ids.tolist()]

    def lengths(self) -> list[int]:
        """Tokens of each completion: lognormal, at least 1, at most the cap."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        normal = torch.randn(self.num_requests, generator=generator)
        drawn = (self.median * (self.sigma * normal).exp()).round().clamp(1, self.cap)
        return [int(value) for value in drawn.tolist()]

    def requests(self, *, temperature: float = 1.0) -> list[Request]:
        """A group's requests follow one another; each ends at its own max_tokens and at no other
        token."""
        lengths = iter(self.lengths())
        return [
            Request(
                prompt_ids=ids,
                sampling=Sampling(max_tokens=next(lengths), temperature=temperature),
                sample_id=SampleId(prompt_uid=str(prompt), index=index),
                seed=self.seed,
            )
            for prompt, ids in enumerate(self.prompt_ids())
            for index in range(self.samples)
        ]
