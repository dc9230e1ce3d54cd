"""Layouts read from live tensors and from a checkpoint's metadata agree with declared ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

from shardloop.errors import LayoutError
from shardloop.families import CanonicalModel
from shardloop.layout import Layout, make_layout
from shardloop.layout.chunks import Chunk, layout_of_chunks
from shardloop.layout.observed import Placed, Shard, differences, layout_of_placements
from shardloop.parallel.context import RankContext
from shardloop.parallel.observed import check_placed, layout_of_state_dict
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from tests.families.configs import moe_config
from tests.harness import run_ranks
from tests.layout.reference import expected_local, labels, tiny_model
from tests.layout.test_schemes import assert_same, from_pieces

ROWS, COLUMNS = (
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head"),
    ("o_proj", "down"),
)


LIVE = ("fsdp=4", "fsdp=2,tp=2", "dp=2,fsdp=2", "tp=4")


NAME = "model.layers.1.mlp.up_proj.weight"


def model() -> CanonicalModel:
    return tiny_model("qwen2", num_key_value_heads=4, vocab_size=10, hidden_size=6)


class Weights(nn.Module):
    """A module that has one parameter, for each tensor of a model."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = nn.Parameter(tensor)


def live(spec: str) -> dict[str, torch.Tensor]:
    """The model's tensors as tensor parallelism and then FSDP2 place them."""
    axes = {name: int(size) for name, size in (item.split("=") for item in spec.split(","))}
    names = tuple(name for name in ("dp", "fsdp", "tp") if name in axes)
    mesh = init_device_mesh("cpu", tuple(axes[n] for n in names), mesh_dim_names=names)
    data = tuple(name for name in names if name != "tp")
    state = {}
    for name, shape in model().tensor_shapes().items():
        tensor: torch.Tensor = torch.zeros(shape)
        if "tp" in names:
            cut = [TorchShard(0)] if any(stem in name for stem in ROWS) else [Replicate()]
            if name.endswith("weight") and any(stem in name for stem in COLUMNS):
                cut = [TorchShard(1)]
            tensor = distribute_tensor(tensor, mesh["tp"], cut)
        module = Weights(tensor)
        if data:
            fully_shard(module, mesh=mesh[data if "fsdp" in data else ("dp",)])
        state[name] = module.tensor.detach()
    return state


def observe(context: RankContext, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for spec in LIVE:
        state = live(spec)
        found[spec] = layout_of_state_dict(model(), state)
        dcp.save(state, checkpoint_id=str(folder / spec))
    partial = DTensor.from_local(torch.zeros(10, 6), init_device_mesh("cpu", (4,)), [Partial()])
    try:
        layout_of_state_dict(model(), {**state, "model.embed_tokens.weight": partial})
    except LayoutError as error:
        found["partial"] = str(error)
    found["placed"] = {spec: placement_fault(spec, state, range(4)) for spec in LIVE}
    found["turned round"] = placement_fault(LIVE[-1], state, [3, 2, 1, 0])
    dist.barrier()
    return found


def placement_fault(spec: str, state: dict[str, torch.Tensor], ranks: Sequence[int]) -> str | None:
    try:
        check_placed(make_layout(model(), spec), state, ranks=ranks)
    except LayoutError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def observed(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(observe, 4, folder)


@pytest.mark.parametrize("spec", LIVE)
def test_layout_of_live_tensors_is_the_declared_one(
    spec: str, observed: list[dict[str, Any]]
) -> None:
    declared = make_layout(model(), spec)
    for found in observed:
        assert found[spec].tensors == declared.tensors
        assert differences(declared, found[spec]) == []


def test_tensors_that_lie_otherwise_than_declared_are_named(
    observed: list[dict[str, Any]],
) -> None:
    for found in observed:
        assert found["placed"].pop(LIVE[-1]) is None
        for spec, fault in found["placed"].items():
            assert f"otherwise than layout {spec} says" in fault
            assert "weight: rank " in fault and "declared is" in fault
        assert "lies on ranks [0, 1, 2, 3]; they must be [3, 2, 1, 0]" in found["turned round"]


def test_partial_sums_are_refused_by_name(observed: list[dict[str, Any]]) -> None:
    for found in observed:
        assert "model.embed_tokens.weight is a partial sum, Partial(sum)" in found["partial"]


def chunks_of(folder: Path) -> dict[str, list[Chunk]]:
    """What a checkpoint's metadata says of each tensor: boxes, and the rank whose file has them."""
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    holder = {
        (index.fqn, tuple(index.offset)): int(where.relative_path.split("_")[2])
        for index, where in metadata.storage_data.items()
    }
    return {
        name: [
            Chunk(tuple(c.offsets), tuple(c.sizes), holder[name, tuple(c.offsets)])
            for c in entry.chunks
            if 0 not in c.sizes
        ]
        for name, entry in metadata.state_dict_metadata.items()
    }


@pytest.mark.parametrize("spec", LIVE)
def test_layout_of_a_checkpoint_is_the_declared_one_but_for_copies(
    spec: str, observed: list[dict[str, Any]], folder: Path
) -> None:
    """Of what several ranks hold a checkpoint keeps one copy."""
    layout = layout_of_chunks(model(), chunks_of(folder / spec), num_holders=4)
    declared = make_layout(model(), spec)
    if spec == "fsdp=4":
        assert differences(declared, layout) == []
    held = [{(p.name, p.box) for p in layout.pieces(rank)} for rank in range(4)]
    may = [{(p.name, p.box) for p in declared.pieces(rank)} for rank in range(4)]
    assert all(has <= can for has, can in zip(held, may, strict=True))
    assert set.union(*held) == set.union(*may)
    assert sum(map(len, held)) == len(set.union(*held))


def placed(spec: str, **changes: Placed) -> dict[str, Placed]:
    """By the rules of the trainer: rows over fsdp, and over tp before."""
    axes = tuple((n, int(s)) for n, s in (item.split("=") for item in spec.split(",")))
    found = {}
    for name, shape in model().tensor_shapes().items():
        dim = 0 if any(stem in name for stem in ROWS) else None
        dim = 1 if name.endswith("weight") and any(stem in name for stem in COLUMNS) else dim
        tp = dict(axes).get("tp", 1)
        after = [n for n, _ in axes].index("tp") > [n for n, _ in axes].index("fsdp")
        by = {
            "tp": None if dim is None else Shard(dim),
            "fsdp": Shard(0, tp if dim == 0 and after else 1),
            "dp": None,
        }
        found[name] = Placed(shape, axes, tuple(by[n] for n, _ in axes))
    return {**found, **changes}


@pytest.mark.parametrize("spec", ["fsdp=2,tp=2", "tp=2,fsdp=3", "dp=2,fsdp=3,tp=4"])
def test_a_strided_shard_is_cut_after_the_axes_that_follow_it(spec: str) -> None:
    assert layout_of_placements(model(), placed(spec)).tensors == make_layout(model(), spec).tensors


def test_axes_of_size_one_are_left_out() -> None:
    found = layout_of_placements(model(), placed("dp=1,fsdp=3,tp=1"))
    assert found.tensors == make_layout(model(), "fsdp=3").tensors


def test_placements_that_say_nothing_are_refused() -> None:
    wrong = placed("fsdp=2,tp=2")
    norm = "model.norm.weight"
    other = "model.layers.1.mlp.up_proj.weight"
    axes = (("fsdp", 2), ("tp", 2))
    cases = {
        "missing: model.norm.weight": {k: v for k, v in wrong.items() if k != norm},
        "unknown: extra": {**wrong, "extra": wrong[norm]},
        "model.norm.weight has shape (7,), it must be (6,)": {
            **wrong,
            norm: replace(wrong[norm], shape=(7,)),
        },
        "model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight lie differently": {
            **wrong,
            other: replace(wrong[other], shards=(None, None)),
        },
        "axis fsdp cuts what is in 3 parts, but the axes after it make 2": {
            **wrong,
            norm: Placed((6,), axes, (Shard(0, 3), Shard(0))),
        },
    }
    for message, tensors in cases.items():
        with pytest.raises(LayoutError) as error:
            layout_of_placements(model(), tensors)
        assert message in str(error.value)


def test_differences_name_the_tensor_and_the_rank() -> None:
    declared = make_layout(model(), "fsdp=2")
    norm = "model.norm.weight"
    axes = (("fsdp", 2),)
    whole = {n: Placed(s, axes, (Shard(0),)) for n, s in model().tensor_shapes().items()}
    found = layout_of_placements(model(), {**whole, norm: Placed((6,), axes, (None,))})
    assert differences(declared, found) == [
        f"{norm}: rank 0 holds [0:6], declared is [0:3]; rank 1 holds [0:6], declared is [3:6]"
    ]
    assert differences(declared, make_layout(model(), "fsdp=3")) == [
        "2 ranks are declared, there are 3"
    ]


def chunked(layout: Layout) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {name: [] for name in layout.model.tensor_shapes()}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            offsets, sizes = zip(*((lo, hi - lo) for lo, hi in piece.box), strict=True)
            found[piece.name].append(Chunk(offsets, sizes, rank))
    return found


@pytest.mark.parametrize(
    "spec", ["fsdp=3", "zero3=5", "pp=2,tp=2", "tp=2,fsdp=2", "pp=2,fsdp=2,ep=2", "dp=2,zero3=3"]
)
def test_chunks_of_any_layout_are_read_back_and_are_a_source(spec: str) -> None:
    """Also where layers and experts are on ranks of their own."""
    moe = tiny_model(**moe_config("qwen3_moe"))
    declared, target = make_layout(moe, spec), make_layout(moe, "engine:tp=2")
    layout = layout_of_chunks(moe, chunked(declared), num_holders=declared.world_size)
    assert differences(declared, layout) == []
    full = labels(moe)
    plan = plan_reshard(layout, target)
    source = {rank: from_pieces(layout, rank, full) for rank in plan.src_ranks}
    found = {
        rank: {n: np.zeros(shape, int) for n, shape in target.local_shapes(i).items()}
        for i, rank in enumerate(plan.dst_ranks)
    }
    execute_inprocess(verify(plan), source, found)
    for i, rank in enumerate(plan.dst_ranks):
        assert_same(found[rank], expected_local(moe, "engine:tp=2", i, full))


def test_tensors_that_lie_in_no_order_are_local_tensors_of_their_own() -> None:
    chunks = chunked(make_layout(model(), "fsdp=4"))
    chunks = {
        n: [c._replace(holder=3 - c.holder) if n == NAME else c for c in v]
        for n, v in chunks.items()
    }
    layout = layout_of_chunks(model(), chunks, num_holders=4)
    held = [[p.box for p in layout.pieces(r) if p.name == NAME] for r in range(4)]
    assert held == [[((6, 8), (0, 6))], [((4, 6), (0, 6))], [((2, 4), (0, 6))], [((0, 2), (0, 6))]]
    lines = differences(make_layout(model(), "fsdp=4"), layout)
    assert len(lines) == 1 and lines[0].startswith(f"{NAME}: rank 0 holds [6:8, 0:6], declared")


def test_chunks_outside_a_tensor_or_of_no_holder_are_refused() -> None:
    chunks = chunked(make_layout(model(), "fsdp=1"))
    chunks["model.norm.weight"] = [Chunk((3,), (4,), 0), Chunk((0,), (3,), 2)]
    with pytest.raises(LayoutError) as error:
        layout_of_chunks(model(), chunks, num_holders=2)
    assert "model.norm.weight of shape (6,) has no chunk at (3,) of size (4,)" in str(error.value)
    assert "model.norm.weight is held by 2; choose from 0 to 1" in str(error.value)
