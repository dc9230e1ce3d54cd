"""The proof of layouts: meshes, cuts and names that no rank can hold are refused on both sides."""

from dataclasses import replace

import pytest

from shardloop.errors import PlanError
from shardloop.families.base import Dim, TensorClass
from shardloop.layout import Layout, make_layout
from shardloop.layout.layout import LocalTensor
from shardloop.layout.strips import OWN, Strips, clip, pick, whole
from shardloop.layout.tables import Axis, Cut, Mesh, make_mesh, make_table
from shardloop.reshard.cross import of_copies
from shardloop.reshard.join import join
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify
from tests.layout.reference import tiny_model
from tests.reshard.broken import (
    DEEPSEEK,
    ROUTES,
    make,
)
from tests.reshard.simulate import (
    planned,
)

SIDES = {"src": "source", "dst": "destination"}


def with_tensor(plan: Plan, side: str, old: LocalTensor, new: LocalTensor) -> Plan:
    """The plan with one tensor of a side exchanged, in its flows as well."""
    layout: Layout = getattr(plan, side)
    tensors = tuple(new if tensor is old else tensor for tensor in layout.tensors)
    flows = []
    for flow in plan.flows:
        src = tuple(new if t is old and side == "src" else t for t in flow.src)
        dst = new if flow.dst is old and side == "dst" else flow.dst
        flows.append(replace(flow, src=src, dst=dst))
    return replace(plan, **{side: replace(layout, tensors=tensors)}, flows=tuple(flows))


def with_axis(tensor: LocalTensor, old: Axis, new: Axis) -> LocalTensor:
    def renewed(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(new if axis == old else axis for axis in axes)

    cuts = tuple(replace(cut, axes=renewed(cut.axes)) for cut in tensor.cuts)
    return replace(tensor, mesh=renewed(tensor.mesh), cuts=cuts)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("route", ROUTES, ids=" to ".join)
def test_a_wrong_stride_of_a_mesh_is_refused(side: str, route: tuple[str, str]) -> None:
    plan = make(route)
    for tensor in getattr(plan, side).tensors[:3]:
        for axis in (axis for axis in tensor.mesh if axis.size > 1):
            for stride in (axis.stride * 2, axis.stride + 1):
                wrong = with_axis(tensor, axis, axis._replace(stride=stride))
                with pytest.raises(PlanError, match=r"axis .* stride must be"):
                    verify(with_tensor(plan, side, tensor, wrong))


@pytest.mark.parametrize("side", ["src", "dst"])
def test_an_axis_that_cuts_two_dims_or_is_of_another_mesh_is_refused(side: str) -> None:
    plan = make(("fsdp=2,tp=2", "engine:tp=4"))
    tensor = next(t for t in getattr(plan, side).tensors if "embed" in t.template)
    used = tensor.cuts[2]
    twice = replace(tensor, cuts=(*tensor.cuts[:3], replace(used, dims=(3,))))
    with pytest.raises(PlanError, match=r"embed_tokens.weight: axis tp cuts 2 dims"):
        verify(with_tensor(plan, side, tensor, twice))
    other = tuple(axis._replace(name=f"{axis.name}2") for axis in used.axes)
    foreign = replace(tensor, cuts=(*tensor.cuts[:2], replace(used, axes=other), tensor.cuts[3]))
    with pytest.raises(PlanError, match="is not in its mesh"):
        verify(with_tensor(plan, side, tensor, foreign))


def test_a_segment_of_two_classes_is_refused() -> None:
    """Fused tensors whose strip does not say whose a segment is."""
    plan = make(ROUTES[0])
    tensor = next(t for t in plan.dst.tensors if "gate_up" in t.template)
    cut = tensor.cuts[2]
    strips = cut.strips
    unnamed = Strips(
        strips.num_parts, ("*", *strips.keys[1:]), strips.part, strips.key, strips.lo, strips.hi
    )
    cuts = (*tensor.cuts[:2], replace(cut, strips=unnamed), *tensor.cuts[3:])
    with pytest.raises(PlanError, match=r"belong to all of mlp\.gate_proj\.weight, mlp\.up_proj"):
        verify(with_tensor(plan, "dst", tensor, replace(tensor, cuts=cuts)))


def test_a_destination_that_leaves_out_elements_is_refused() -> None:
    """A layout whose last rows became padding: its own plan is sound, but it is no whole model."""
    model = make(ROUTES[0]).dst.model
    layout = make_layout(model, "fsdp=2")
    tensor = layout.tensors[0]
    cut = tensor.cuts[2]
    short = replace(
        tensor,
        cuts=(*tensor.cuts[:2], replace(cut, strips=clip(cut.strips, 0, 8)), *tensor.cuts[3:]),
    )
    shorter = replace(layout, tensors=(short, *layout.tensors[1:]))
    plan = plan_reshard(make_layout(model, "engine:tp=2"), shorter)
    with pytest.raises(
        PlanError, match=f"{tensor.keys[0]}: no rank of the destination holds dim 0 8:10"
    ):
        verify(plan)


def test_copies_of_a_tied_tensor_are_cut_by_the_same_axes() -> None:
    """Equal parts of equal boxes, but ranks take them apart by other axes in either copy."""
    mesh = make_mesh((("b", 2), ("a", 2)))
    b, a = mesh
    model = replace(
        tiny_model(),
        classes=(
            TensorClass(key="embed", template="embed", layers=(-1, 0), dims=(Dim("hidden", 4),)),
        ),
    )

    def layout(axes: Mesh, *tensors: LocalTensor) -> Layout:
        return Layout(spec="by hand", model=model, mesh=axes, tensors=tensors)

    def tensor(name: str, mesh: Mesh, layers: Axis, own: Axis) -> LocalTensor:
        everywhere = pick(whole(OWN, (-1, 0)), [[0]] * layers.size)
        first = pick(whole(OWN, (0, 4)), [[0], *([[]] * (own.size - 1))])
        cuts = (
            Cut((0,), (layers,), everywhere),
            Cut((1,), (), whole(OWN, (0, 1))),
            Cut((2,), (own,), first),
        )
        return LocalTensor(template=name, keys=("embed",), mesh=mesh, cuts=cuts)

    src = layout(mesh, tensor("embed", mesh, a, b), tensor("head", mesh, b, a))
    one = make_mesh((("a", 1), ("b", 1)))
    plan = plan_reshard(src, layout(one, tensor("embed", one, *one)))
    verify(plan)
    (flow,) = plan.flows
    tables = tuple(make_table(t.cuts[0], "embed") for t in src.tensors)
    merged = join(of_copies(tables), flow.joins[0].dst)
    both = replace(flow, src=src.tensors, joins=(merged, *flow.joins[1:]))
    with pytest.raises(PlanError, match="are not spread over the ranks alike"):
        verify(replace(plan, flows=(both,)))


@pytest.mark.parametrize("template", ["{layer:02d}.x", "{expert}.x{layer}", "{rank}.{layer}"])
def test_names_have_no_other_fields_than_numbers(template: str) -> None:
    plan = make(ROUTES[0])
    old = next(t for t in plan.dst.tensors if "experts" not in t.template and "{" in t.template)
    new = replace(old, template=template, stacked=True)
    with pytest.raises(PlanError, match=r"can have no fields but \{layer\}"):
        verify(with_tensor(plan, "dst", old, new))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("many_layers", [True, False])
def test_equal_names_on_a_rank_are_refused(side: str, many_layers: bool) -> None:
    """Two layers of one tensor, or two tensors of which one has its layer written out."""
    plan = make(ROUTES[1])
    tensors = {tensor.template: tensor for tensor in getattr(plan, side).tensors}
    norm = next(template for template in tensors if "input_layernorm" in template)
    old = tensors[norm if many_layers else "model.norm.weight"]
    new = replace(old, template=norm.format(layer=1))
    match = (
        f"{SIDES[side]} {new.template}: some ranks give several layers one name"
        if many_layers
        else f"{SIDES[side]} {new.template}: several .* share this name on rank 0"
    )
    with pytest.raises(PlanError, match=match):
        verify(with_tensor(plan, side, old, new))


def test_stages_may_share_names_and_the_ranks_of_one_stage_may_not() -> None:
    """Megatron's numbers count the layers of a stage, so every stage has a layer 0."""
    model = tiny_model("deepseek_v3", **DEEPSEEK)
    plan = planned(model, "engine:tp=2", "megatron:pp=2,dp=2")
    verify(plan)
    for stem, what in (("{layer}", "layers"), ("{expert}", "experts")):
        old = next(t for t in plan.dst.tensors if stem in t.template and "experts" in t.template)
        new = replace(old, template=old.template.replace(stem, "0"))
        with pytest.raises(PlanError, match=f"give several {what} one name"):
            verify(with_tensor(plan, "dst", old, new))
