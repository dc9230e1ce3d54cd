"""Layouts of Megatron-Core's GPT models. Called by `layout.schemes`. Floor 1.

Names are those of the Transformer Engine layer spec with grouped experts, as Megatron-Bridge's
conversions list them (`core/models/gpt/gpt_layer_specs.py`, `bridge/models/*/`). What differs from
Hugging Face, with the place in `megatron/core` that says so:

    linear_qkv    kv group after kv group, each its q heads, its k head, its v head; ranks have
                  equal shares of these rows, also where there are more ranks than groups
                  (`transformer/attention.py`, `get_query_key_value_tensors`)
    linear_fc1    each rank its gate rows, then its up rows
    embedding     rows padded to a multiple of 128 x tp (`make_vocab_size_divisible_by`)
    experts       their own mesh, its axes (pp, edp, ep, etp) from the outermost
                  (`parallel_state.py`); etp is tp where it is not given
    latents       `linear_q_down_proj`, `linear_kv_down_proj` and the router are on every tp rank
    output_layer  of a tied model: a copy of the embedding on the last of several stages
    numbers       layers and experts in names count those of the rank. With vpp, names run on over
                  a rank's chunks: layer n of chunk v is v x (layers of a chunk) + n

Only the last stage may have fewer layers (`num_layers_in_last_pipeline_stage`). LoRA factors and
FP8 scales have no counterpart: Megatron keeps one factor A for a fused tensor, and other scales.
"""

from collections.abc import Iterator
from typing import NamedTuple

from shardloop.errors import LayoutError
from shardloop.families.base import CanonicalModel, TensorClass
from shardloop.layout.grid import Grid, make_grids
from shardloop.layout.hf import EMBEDDING, HEAD
from shardloop.layout.layout import LocalTensor
from shardloop.layout.parse import LayoutSpec
from shardloop.layout.stages import expert_cut, layer_cut
from shardloop.layout.strips import OWN, Strips, cat, pad, pick, split, whole
from shardloop.layout.tables import Cut
from shardloop.layout.tp import tp_cut

LAYERS = "decoder.layers.{layer}."
OUTPUT = "output_layer.weight"
VOCAB_MULTIPLE = 128


class Named(NamedTuple):
    """A tensor of a Megatron model and what it holds."""

    name: str
    members: tuple[str, ...]
    """Keys of classes, in the order of the rows."""
    layers_of: str = ""
    """Only in the layers of this class."""


def _linear(name: str, *members: str, layers_of: str = "") -> tuple[Named, Named]:
    weight, bias = (
        Named(f"{name}.{kind}", tuple(f"{member}.{kind}" for member in members), layers_of)
        for kind in ("weight", "bias")
    )
    return weight, bias


ATTENTION, LATENT = "self_attn.k_proj.weight", "self_attn.kv_b_proj.weight"
DENSE_MLP = "mlp.gate_proj.weight"
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

NAMES = (
    Named("embedding.word_embeddings.weight", (EMBEDDING,)),
    Named(
        LAYERS + "self_attention.linear_qkv.layer_norm_weight",
        ("input_layernorm.weight",),
        ATTENTION,
    ),
    Named(LAYERS + "input_layernorm.weight", ("input_layernorm.weight",), LATENT),
    *_linear(LAYERS + "self_attention.linear_qkv", *QKV, layers_of=ATTENTION),
    Named(LAYERS + "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Named(LAYERS + "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    *_linear(LAYERS + "self_attention.linear_q_proj", "self_attn.q_proj", layers_of=LATENT),
    *_linear(LAYERS + "self_attention.linear_q_down_proj", "self_attn.q_a_proj"),
    Named(
        LAYERS + "self_attention.linear_q_up_proj.layer_norm_weight",
        ("self_attn.q_a_layernorm.weight",),
    ),
    *_linear(LAYERS + "self_attention.linear_q_up_proj", "self_attn.q_b_proj"),
    *_linear(LAYERS + "self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"),
    Named(
        LAYERS + "self_attention.linear_kv_up_proj.layer_norm_weight",
        ("self_attn.kv_a_layernorm.weight",),
    ),
    *_linear(LAYERS + "self_attention.linear_kv_up_proj", "self_attn.kv_b_proj"),
    *_linear(LAYERS + "self_attention.linear_proj", "self_attn.o_proj"),
    Named(
        LAYERS + "mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), DENSE_MLP
    ),
    *(
        Named(LAYERS + "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), router)
        for router in ROUTERS
    ),
    *_linear(LAYERS + "mlp.linear_fc1", "mlp.gate_proj", "mlp.up_proj"),
    *_linear(LAYERS + "mlp.linear_fc2", "mlp.down_proj"),
    *(Named(LAYERS + "mlp.router.weight", (router,)) for router in ROUTERS),
    Named(LAYERS + "mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
    *(
        Named(LAYERS + f"mlp.experts.linear_{name}.weight{{expert}}", members)
        for name, members in (
            (
                "fc1",
                ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
            ),
            ("fc2", ("mlp.experts.{expert}.down_proj.weight",)),
            (
                "fc1",
                (
                    "block_sparse_moe.experts.{expert}.w1.weight",
                    "block_sparse_moe.experts.{expert}.w3.weight",
                ),
            ),
            ("fc2", ("block_sparse_moe.experts.{expert}.w2.weight",)),
        )
    ),
    *_linear(
        LAYERS + "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    *_linear(LAYERS + "mlp.shared_experts.linear_fc2", "mlp.shared_experts.down_proj"),
    Named("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Named(OUTPUT, (HEAD,)),
)


def megatron_tensors(model: CanonicalModel, spec: LayoutSpec) -> Iterator[LocalTensor]:
    """
    Raises:
        LayoutError: the model has tensors that Megatron's has not.
    """
    grids = make_grids(spec)
    named = [row for row in NAMES if _is_there(model, row)]
    left = {c.key for c in model.classes} - {key for row in named for key in row.members}
    if left:
        raise LayoutError(
            f"layout {spec}: Megatron has no name for {', '.join(sorted(left))} of model "
            f"{model.name}; leave them out of the model"
        )
    for row in named:
        grid = grids.of(model.class_of[row.members[0]])
        yield _local_tensor(model, row, grid, vpp=spec.size("vpp"))
    if model.tied and spec.size("pp") > 1:
        yield _local_tensor(model, Named(OUTPUT, (EMBEDDING,)), grids.dense, vpp=spec.size("vpp"))


def megatron_faults(model: CanonicalModel, tp: int) -> list[str]:
    """Why tp ranks cannot share linear_qkv, where there are more of them than kv groups."""
    num_rows = model.sizes.get("q", 0) + 2 * model.sizes.get("kv", 0)
    if "kv" in model.units and num_rows % tp:
        return [f"tp={tp} does not divide the {num_rows} rows of linear_qkv; choose another tp"]
    return []


def _is_there(model: CanonicalModel, row: Named) -> bool:
    return all(key in model.class_of for key in (*row.members, *filter(None, [row.layers_of])))


def _local_tensor(model: CanonicalModel, row: Named, grid: Grid, *, vpp: int) -> LocalTensor:
    group = [model.class_of[key] for key in row.members]
    first = group[0]
    layers = model.class_of[row.layers_of].layers if row.layers_of else first.layers
    columns = enumerate(first.dims[1:], start=3)
    return LocalTensor(
        template=row.name,
        keys=row.members,
        mesh=grid.mesh,
        cuts=(
            layer_cut(model, layers, grid.pp, vpp=vpp, at_end=row.name == OUTPUT),
            expert_cut(first, grid.ep),
            _rows(model, group, grid),
            *(tp_cut(model, i, [(OWN, dim)], grid.tp) for i, dim in columns),
        ),
        local_numbers=True,
    )


def _rows(model: CanonicalModel, group: list[TensorClass], grid: Grid) -> Cut:
    meaning = group[0].dims[0].meaning
    if meaning == "vocab":
        return _split_by_tp(_padded_vocab(model, grid), grid)
    if len(group) == len(QKV):
        return _split_by_tp(_by_group(model, group), grid)
    members = [(c.key if len(group) > 1 else OWN, c.dims[0]) for c in group]
    return tp_cut(model, 2, members, grid.tp)


def _by_group(model: CanonicalModel, group: list[TensorClass]) -> Strips:
    num_groups = model.units["kv"]
    parts = cat(*(split(whole(c.key, (0, c.dims[0].size)), num_groups) for c in group))
    return pick(parts, [range(num_groups)])


def _padded_vocab(model: CanonicalModel, grid: Grid) -> Strips:
    multiple = VOCAB_MULTIPLE * (1 if grid.tp is None else grid.tp.size)
    return pad(whole(OWN, (0, model.vocab_size)), -(-model.vocab_size // multiple) * multiple)


def _split_by_tp(strips: Strips, grid: Grid) -> Cut:
    if grid.tp is None:
        return Cut((2,), (), strips)
    return Cut((2,), (grid.tp,), split(strips, grid.tp.size))
