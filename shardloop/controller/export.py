"""The trained policy as a model folder, checked against the engine that sampled. Floor 4.

Called by `controller.run` at the end of a run.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from shardloop import hf
from shardloop.controller.groups import WorkerGroup
from shardloop.controller.rollouts import Sampler
from shardloop.errors import CheckpointError
from shardloop.types import Completion, Prompt

NUM_CHECKED = 8
"""Completions on which the exported model's log-probs are compared with the engine's."""
TOLERANCE = 1e-2
"""Largest difference taken for rounding (bf16 engines); fp32 stays near 1e-5."""


def export_policy(
    trainer: WorkerGroup, sampler: Sampler, folder: Path, *, prompts: Sequence[Prompt], seed: int
) -> float:
    """Writes the trainer's policy to `folder`.

    Args:
        sampler: its engine holds the same weights.
    Returns:
        The largest difference between transformers' log-probs on the folder and the engine's own.
    Raises:
        CheckpointError: the folder cannot be written, or that difference is above `TOLERANCE`.
    """
    trainer.call("export", folder)
    difference = export_difference(sampler, folder, prompts=prompts[:NUM_CHECKED], seed=seed)
    if difference > TOLERANCE:
        raise CheckpointError(
            f"{folder}: transformers' log-probs differ from the engine's by {difference:.1e}"
        )
    return difference


def export_difference(
    sampler: Sampler, folder: Path, *, prompts: Sequence[Prompt], seed: int
) -> float:
    rollouts = sampler.rollout(prompts, samples_per_prompt=1, seed=seed)
    model = hf.load_model(folder, dtype=torch.float32)
    return max(
        logprob_difference(model, completion)
        for rollout in rollouts
        for completion in rollout.completions
    )


def logprob_difference(model: torch.nn.Module, completion: Completion) -> float:
    request = completion.request
    token_ids = [*request.prompt_ids, *completion.token_ids_T]
    theirs = hf.sequence_logprobs(model, token_ids, temperature=request.sampling.temperature)
    ours = torch.tensor(completion.full_T)
    chosen = torch.tensor(completion.loss_mask_T, dtype=torch.bool)
    return (theirs[len(request.prompt_ids) - 1 :] - ours)[chosen].abs().max().item()
