"""Packing and padding cannot be seen in a log-prob.

Arithmetic is float64, where a tolerance of 1e-12 leaves no room for a leak.
"""

import pytest
import torch
from torch import nn

from shardloop import hf
from shardloop.policy import Policy
from shardloop.rl.packing import pack, plan_packing
from tests.models import make_folder
from tests.trainer.batches import make_random_batch


def score_packed(policy: Policy, batch, *, row_tokens: int, rows: int) -> torch.Tensor:
    scores_N = torch.zeros(len(batch.token_ids_N), dtype=torch.float64)
    packing = plan_packing(
        batch.lengths, row_tokens=row_tokens, rows_per_micro_batch=rows, num_ranks=1
    )
    for micro_batch in packing.micro_batches(0):
        packed = pack(batch, micro_batch)
        scores_N[packed.flat_index_n] = score(policy, packed, batch.temperature)
    return scores_N


@torch.no_grad()
def score(policy: Policy, packed, temperature: float, **changes: torch.Tensor) -> torch.Tensor:
    names = ("input_ids_BT", "position_ids_BT", "segment_ids_BT")
    names += ("target_positions_n", "target_ids_n")
    tensors = {name: getattr(packed, name) for name in names} | changes
    return policy(**tensors, temperature=temperature)[0]


def score_one_by_one(causal_lm: nn.Module, batch) -> torch.Tensor:
    rows = torch.split(batch.token_ids_N, batch.lengths)
    zero = torch.zeros(1, dtype=torch.float64)
    scores = [
        torch.cat([zero, hf.sequence_logprobs(causal_lm, row, temperature=batch.temperature)])
        for row in rows
    ]
    return torch.cat(scores).masked_fill(~batch.loss_mask_N, 0.0)


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)]
)
def test_packed_rows_equal_one_sequence_at_a_time(tmp_path, seed, family, tied) -> None:
    causal_lm = hf.load_model(make_folder(tmp_path, family, tied=tied), dtype=torch.float64)
    batch = make_random_batch(seed=seed, num_rows=9)
    expected_N = score_one_by_one(causal_lm, batch)
    policy = Policy(causal_lm).eval()
    for row_tokens, rows in ((2, 1), (12, 3), (30, 2), (200, 8)):
        packed_N = score_packed(policy, batch, row_tokens=row_tokens, rows=rows)
        torch.testing.assert_close(packed_N, expected_N, rtol=0, atol=1e-12)


def test_padding_does_not_matter(tmp_path, seed) -> None:
    policy = Policy(hf.load_model(make_folder(tmp_path), dtype=torch.float64)).eval()
    batch = make_random_batch(seed=seed)
    packed = pack(batch, [[0, 1], [2], [3, 4, 5]])
    padding = packed.segment_ids_BT < 0
    assert padding.any()
    before_n = score(policy, packed, batch.temperature)
    other_ids = packed.input_ids_BT.masked_fill(padding, 17)
    other_positions = packed.position_ids_BT.masked_fill(padding, 5)
    after_n = score(
        policy,
        packed,
        batch.temperature,
        input_ids_BT=other_ids,
        position_ids_BT=other_positions,
    )
    assert torch.equal(before_n, after_n)


def test_a_tied_head_stays_the_embedding(tmp_path) -> None:
    policy = Policy(hf.load_model(make_folder(tmp_path), dtype=torch.float64))
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(policy.named_parameters())
