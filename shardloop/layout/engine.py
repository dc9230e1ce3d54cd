"""Layouts of inference engines: fused and stacked tensors. Called by `layout.schemes`. Floor 1.

Names and fusing are those of vLLM's models (`llama.py`, `mixtral.py`, `deepseek_v2.py` in
`vllm/model_executor/models`, and `layers/fused_moe`):

    self_attn.qkv_proj            each rank's q, k, v rows; k and v of a head on several ranks where
                                  there are more ranks than kv heads
    self_attn.fused_qkv_a_proj    both latent projections, whole on every rank
    mlp.gate_up_proj              each rank's gate rows, then its up rows; shared experts alike
    mlp.experts.w13_weight        [experts, gate rows then up rows, in] of the rank's experts
    mlp.experts.w2_weight         [experts, out, in]
    embeddings and head           every rank as many rows as the first: the last are padded (vLLM
                                  pads to a multiple of 64 before; the engine here does not)

A tied head has no tensor of its own. What belongs to a weight (bias, FP8 scales, LoRA factors) is
fused as the weight is: factors A one after the other along the rank, B along the rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

from shardloop.errors import LayoutError
from shardloop.families.base import CanonicalModel, TensorClass
from shardloop.layout.grid import Grid, is_expert, make_grids
from shardloop.layout.layout import LocalTensor
from shardloop.layout.parse import LayoutSpec
from shardloop.layout.stages import expert_cut, layer_cut
from shardloop.layout.strips import OWN, pad
from shardloop.layout.tables import Cut
from shardloop.layout.tp import tp_cut


class Fused(NamedTuple):
    """Tensors that an engine keeps in one, by the beginnings of their keys."""

    name: str
    members: tuple[str, ...]
    """In the order of the rows."""
    when: str = ""
    """Only in models that have this meaning."""


FUSED = (
    Fused(
        "self_attn.qkv_proj.",
        ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
        when="kv",
    ),
    Fused(
        "self_attn.fused_qkv_a_proj.",
        ("self_attn.q_a_proj.", "self_attn.kv_a_proj_with_mqa."),
        when="q_latent",
    ),
    Fused("mlp.gate_up_proj.", ("mlp.gate_proj.", "mlp.up_proj.")),
    Fused(
        "mlp.shared_experts.gate_up_proj.",
        ("mlp.shared_experts.gate_proj.", "mlp.shared_experts.up_proj."),
    ),
    Fused("mlp.experts.w13_", ("mlp.experts.{expert}.gate_proj.", "mlp.experts.{expert}.up_proj.")),
    Fused("mlp.experts.w2_", ("mlp.experts.{expert}.down_proj.",)),
    Fused(
        "block_sparse_moe.experts.w13_",
        ("block_sparse_moe.experts.{expert}.w1.", "block_sparse_moe.experts.{expert}.w3."),
    ),
    Fused("block_sparse_moe.experts.w2_", ("block_sparse_moe.experts.{expert}.w2.",)),
)


def engine_tensors(model: CanonicalModel, spec: LayoutSpec) -> Iterator[LocalTensor]:
    """
    Raises:
        LayoutError: the model lacks a part of what is fused.
    """
    grids = make_grids(spec)
    for template, group in _groups(model):
        grid = grids.of(group[0])
        yield LocalTensor(
            template=template,
            keys=tuple(c.key for c in group),
            mesh=grid.mesh,
            cuts=(
                layer_cut(model, group[0].layers, grid.pp),
                expert_cut(group[0], grid.ep),
                *_own_cuts(model, group, grid),
            ),
            stacked=is_expert(group[0]),
        )


def _own_cuts(model: CanonicalModel, group: list[TensorClass], grid: Grid) -> list[Cut]:
    first = group[0]
    members = [(c.key if len(group) > 1 else OWN, c.dims[0]) for c in group]
    rows = tp_cut(model, 2, members, grid.tp)
    if first.dims[0].meaning == "vocab":
        rows = Cut(rows.dims, rows.axes, pad(rows.strips, int(rows.strips.length[0])))
    columns = enumerate(first.dims[1:], start=3)
    return [rows, *(tp_cut(model, i, [(OWN, dim)], grid.tp) for i, dim in columns)]


def _groups(model: CanonicalModel) -> Iterator[tuple[str, list[TensorClass]]]:
    """Local name template and the classes it fuses, in the order of each group's first class."""
    done: set[str] = set()
    for c in model.classes:
        fused, kind = _fused(model, c.key)
        if fused is None:
            yield c.template, [c]
            continue
        template = c.template.replace(c.key, fused.name + kind)
        if template in done:
            continue
        done.add(template)
        keys = [member + kind for member in fused.members]
        missing = [key for key in keys if key not in model.class_of]
        if missing:
            raise LayoutError(
                f"the engine fuses {', '.join(keys)} but model {model.name} has no "
                f"{', '.join(missing)}; give the model all of them or none"
            )
        yield template, [model.class_of[key] for key in keys]


def _fused(model: CanonicalModel, key: str) -> tuple[Fused | None, str]:
    """What a tensor is fused into, and the end of its key: weight, bias, ..."""
    for fused in FUSED:
        for member in fused.members:
            if key.startswith(member) and (not fused.when or fused.when in model.units):
                return fused, key.removeprefix(member)
    return None, ""
