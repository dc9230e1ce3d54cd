"""Attention through a reshard: right to rounding, where concatenate-then-cut is silently wrong.

One layer of causal attention, hidden 64, 8 q heads, 2 kv heads of size 8, 5 tokens, unscaled
normal weights from seed 0. Training holds q, k, v apart at TP=2; the engine fuses them.
"""

import pytest
import torch
from torch import Tensor

from shardloop.layout import Layout, make_layout
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import verify
from tests.layout.reference import tiny_model
from tests.reshard.simulate import planned

HIDDEN, NUM_Q, NUM_KV, HEAD_DIM, NUM_TOKENS = 64, 8, 2, 8, 5
MODEL = tiny_model(
    hidden_size=HIDDEN,
    num_attention_heads=NUM_Q,
    num_key_value_heads=NUM_KV,
    head_dim=HEAD_DIM,
    num_hidden_layers=1,
)
PREFIX = "model.layers.0.self_attn."


def drawn_weights(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    shapes = {"q": NUM_Q * HEAD_DIM, "k": NUM_KV * HEAD_DIM, "v": NUM_KV * HEAD_DIM, "o": HIDDEN}
    weights = {kind: torch.randn(rows, HIDDEN).to(dtype) for kind, rows in shapes.items()}
    return weights, torch.randn(NUM_TOKENS, HIDDEN).to(dtype)


def attention(x_TD: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Causal grouped attention of the heads that q, k, v hold, before the sum over ranks."""
    q_HTd = (x_TD @ q.T).view(NUM_TOKENS, -1, HEAD_DIM).transpose(0, 1)
    k_HTd = (x_TD @ k.T).view(NUM_TOKENS, -1, HEAD_DIM).transpose(0, 1)
    v_HTd = (x_TD @ v.T).view(NUM_TOKENS, -1, HEAD_DIM).transpose(0, 1)
    groups = q_HTd.shape[0] // k_HTd.shape[0]
    k_HTd, v_HTd = (kv.repeat_interleave(groups, 0) for kv in (k_HTd, v_HTd))
    scores = q_HTd @ k_HTd.transpose(1, 2) / HEAD_DIM**0.5
    causal = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    heads = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v_HTd
    return heads.transpose(0, 1).reshape(NUM_TOKENS, -1) @ o.T


def fused_attention(x_TD: Tensor, qkv: Tensor, o: Tensor, *, num_q: int, num_kv: int) -> Tensor:
    rows = [num_q * HEAD_DIM, num_kv * HEAD_DIM, num_kv * HEAD_DIM]
    return attention(x_TD, *qkv.split(rows), o)


def engine_weights(plan: Plan, weights: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(qkv, o) of every engine rank, carried by the plan from the training ranks."""
    dtype = weights["q"].dtype

    def zeros(layout: Layout) -> dict[int, dict[str, Tensor]]:
        return {
            rank: {n: torch.zeros(s, dtype=dtype) for n, s in layout.local_shapes(rank).items()}
            for rank in range(layout.world_size)
        }

    src = zeros(plan.src)
    for rank in range(plan.src.world_size):
        for kind in "qkvo":
            part = weights[kind].chunk(plan.src.world_size, dim=1 if kind == "o" else 0)[rank]
            src[rank][f"{PREFIX}{kind}_proj.weight"].copy_(part)
    local = zeros(plan.dst)
    dst = {plan.dst_ranks[rank]: tensors for rank, tensors in local.items()}
    execute_inprocess(verify(plan), src, dst)
    names = f"{PREFIX}qkv_proj.weight", f"{PREFIX}o_proj.weight"
    return [(dst[rank][names[0]], dst[rank][names[1]]) for rank in plan.dst_ranks]


def error_of_plan(tp: int, dtype: torch.dtype) -> float:
    weights, x_TD = drawn_weights(dtype)
    right = attention(x_TD, **weights)
    num_kv = max(1, NUM_KV // tp)
    shards = engine_weights(planned(MODEL, "tp=2", f"engine:tp={tp}"), weights)
    parts = [fused_attention(x_TD, *s, num_q=NUM_Q // tp, num_kv=num_kv) for s in shards]
    return (sum(parts[1:], parts[0]) - right).abs().max().item()


@pytest.mark.parametrize("tp, about", [(2, 4.6e-5), (4, 6.1e-5)])
def test_attention_after_the_reshard_is_right_to_rounding(tp: int, about: float) -> None:
    error = error_of_plan(tp, torch.float32)
    assert about / 10 < error < 1e-4
    assert error_of_plan(tp, torch.float64) < 1e-9


def test_concatenate_then_cut_has_legal_shapes_and_a_huge_error() -> None:
    weights, x_TD = drawn_weights(torch.float32)
    naive = torch.cat([weights["q"], weights["k"], weights["v"]]).chunk(2)
    shards = engine_weights(planned(MODEL, "tp=2", "engine:tp=2"), weights)
    assert [qkv.shape for qkv in naive] == [qkv.shape for qkv, _ in shards]
    parts = [
        fused_attention(x_TD, qkv, o, num_q=4, num_kv=1)
        for qkv, (_, o) in zip(naive, shards, strict=True)
    ]
    error = (parts[0] + parts[1] - attention(x_TD, **weights)).abs().max().item()
    assert error == pytest.approx(3.2e2, rel=0.05)


def test_concatenate_then_cut_does_not_fit_when_kv_heads_are_replicated() -> None:
    weights, _ = drawn_weights(torch.float32)
    naive = torch.cat([weights["q"], weights["k"], weights["v"]]).chunk(4)
    shards = engine_weights(planned(MODEL, "tp=2", "engine:tp=4"), weights)
    assert naive[0].shape == (24, HIDDEN)
    assert shards[0][0].shape == (32, HIDDEN)


def test_point_to_point_map_needs_no_gather() -> None:
    """Training ranks 0, 1 feed engine ranks 0..3: each half of the heads stays with its rank."""
    plan = planned(MODEL, "tp=2", "engine:tp=4")
    for engine_rank in range(4):
        got = {
            transfer.name.removeprefix(PREFIX)[0]: (
                transfer.src_rank,
                [row // HEAD_DIM for row in range(*transfer.box[0], HEAD_DIM)],
            )
            for transfer in plan.receives(2 + engine_rank)
            if transfer.name.startswith(PREFIX) and transfer.name[len(PREFIX)] in "qkv"
        }
        trainer = engine_rank // 2
        heads = [2 * engine_rank, 2 * engine_rank + 1]
        assert got == {"q": (trainer, heads), "k": (trainer, [trainer]), "v": (trainer, [trainer])}


def test_half_and_half_of_gathered_gate_up_is_wrong_where_the_plan_is_right() -> None:
    """Fused per rank [g0 g1 u0 u1 | g2 g3 u2 u3]: halves of the concatenation are not gate, up."""
    model = tiny_model(intermediate_size=4, hidden_size=1, num_hidden_layers=1)
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
    plan = planned(model, "engine:tp=2", "fsdp=1")
    fused = "model.layers.0.mlp.gate_up_proj.weight"
    src: dict[int, dict[str, Tensor]] = {}
    for rank in range(2):
        shapes = plan.src.local_shapes(rank)
        src[rank] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        src[rank][fused] = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
    shapes = make_layout(model, "fsdp=1").local_shapes(0)
    dst = {2: {name: torch.zeros(shape) for name, shape in shapes.items()}}
    execute_inprocess(verify(plan), src, dst)
    assert torch.equal(dst[2]["model.layers.0.mlp.gate_proj.weight"], gate)
    assert torch.equal(dst[2]["model.layers.0.mlp.up_proj.weight"], up)
    halves = torch.cat([src[0][fused], src[1][fused]]).chunk(2)
    assert halves[0].shape == gate.shape
    assert halves[0].flatten().tolist() == [0, 1, 10, 11]
