"""The proof: every kind of broken plan is refused, and there is no other way to a Proof."""

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from shardloop.errors import PlanError
from shardloop.families.base import Dim, TensorClass
from shardloop.layout import Layout, make_layout
from shardloop.layout.layout import LocalTensor
from shardloop.layout.strips import OWN, Strips, clip, pick, whole
from shardloop.layout.tables import Axis, Cut, Mesh, Table, make_mesh, make_table
from shardloop.reshard.cross import of_copies
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.join import Join, join
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import Proof, verify
from tests.layout.reference import labels, tiny_model
from tests.reshard.broken import (
    DEEPSEEK,
    WAYS,
    any_number_changed,
    every_model,
    random_plans,
    with_join,
    with_pairs,
)
from tests.reshard.simulate import (
    assert_same,
    carried,
    empty_tensors,
    expected_tensors,
    planned,
    random_plan,
    source_tensors,
)

ROUTES = [
    ("fsdp=3", "engine:tp=4"),
    ("dp=2,fsdp=2", "engine:replicas=2,tp=2"),
    ("zero3=3,tp=2", "engine:tp=4"),
    ("engine:tp=4", "megatron:pp=2,tp=2"),
]
SIDES = {"src": "source", "dst": "destination"}


def make(route: tuple[str, str]) -> Plan:
    model = tiny_model("qwen3", num_attention_heads=8, num_key_value_heads=2, hidden_size=7)
    return planned(model, *route)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_broken_join_is_refused(
    way: Callable[[Join, random.Random], Join | None], seed: int
) -> None:
    rng = random.Random(f"{seed} {way.__name__}")
    num_broken = 0
    for plan in random_plans(rng, 8):
        flows = rng.sample(range(len(plan.flows)), k=4)
        for flow, index in ((f, i) for f in flows for i in range(len(plan.flows[f].joins))):
            tried = (way(plan.flows[flow].joins[index], rng) for _ in range(8))
            for broken in islice((step for step in tried if step is not None), 1):
                num_broken += 1
                with pytest.raises(PlanError, match="faults"):
                    verify(with_join(plan, flow, index, broken))
    assert num_broken >= 10


def test_plans_of_all_layouts_are_proved(seed: int) -> None:
    for plan in random_plans(random.Random(seed), 40):
        assert verify(plan).num_classes == len(plan.dst.model.classes)


def test_a_plan_that_is_proved_is_right_whatever_was_changed(seed: int) -> None:
    """Any number, in any column: where the proof sees no fault, there must be none."""
    rng = random.Random(seed)
    num_refused = 0
    for plan in (random_plan(seed * 100 + i) for i in range(4)):
        for _ in range(8):
            flow = rng.randrange(len(plan.flows))
            index = rng.randrange(len(plan.flows[flow].joins))
            broken = any_number_changed(plan.flows[flow].joins[index], rng)
            try:
                proved = verify(with_join(plan, flow, index, broken)).plan
            except PlanError:
                num_refused += 1
                continue
            full = labels(plan.src.model)
            assert_same(carried(proved, source_tensors(plan, full)), expected_tensors(plan, full))
            sent, received = (
                sorted(repr(transfer) for rank in proved.ranks for transfer in list_of(rank))
                for list_of in (proved.sends, proved.receives)
            )
            assert sent == received
    assert num_refused >= 3


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


def test_a_missing_and_a_doubled_flow_are_refused() -> None:
    plan = make(ROUTES[0])
    with pytest.raises(PlanError) as error:
        verify(replace(plan, flows=plan.flows[2:]))
    for flow in plan.flows[:2]:
        assert f"{flow.key} in {flow.dst.template}: 0 flows and 1 declared" in str(error.value)
    with pytest.raises(PlanError, match="2 flows and 1 declared"):
        verify(replace(plan, flows=(*plan.flows, plan.flows[0])))


def test_a_flow_from_a_tensor_of_another_class_is_refused() -> None:
    plan = make(ROUTES[0])
    keys = [flow.key for flow in plan.flows]
    k, v = keys.index("self_attn.k_proj.weight"), keys.index("self_attn.v_proj.weight")
    flows = list(plan.flows)
    flows[k] = replace(flows[k], src=flows[v].src)
    with pytest.raises(PlanError, match="of the source does not show it"):
        verify(replace(plan, flows=tuple(flows)))


def test_a_dtype_that_differs_between_the_sides_is_refused() -> None:
    plan = make(ROUTES[0])
    model = plan.dst.model
    classes = (replace(model.classes[0], dtype="float32"), *model.classes[1:])
    other = replace(plan.dst, model=replace(model, classes=classes))
    with pytest.raises(PlanError, match=f"{classes[0].key}: in the destination.*dtype float32"):
        verify(replace(plan, dst=other))


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


def test_all_faults_are_listed_but_many_of_a_kind_are_counted() -> None:
    plan = make(ROUTES[0])
    broken = plan
    for flow in (0, 3):
        broken = with_join(broken, flow, 2, with_pairs(plan.flows[flow].joins[2], [0]))
    with pytest.raises(PlanError) as error:
        verify(broken)
    for flow in (0, 3):
        assert f"{plan.flows[flow].key}: dim 0: tp=1 gets" in str(error.value)
    big = planned(tiny_model(vocab_size=64), "fsdp=64", "fsdp=64")
    step = big.flows[0].joins[2]
    with pytest.raises(PlanError, match="and 58 more rows") as error:
        verify(with_join(big, 0, 2, replace(step, hi=step.hi - 1)))
    assert len(str(error.value).splitlines()) < 20


def test_a_fault_says_who_gets_what_and_how_often() -> None:
    plan = make(("fsdp=2", "engine:tp=2"))
    step = plan.flows[0].joins[2]
    lo = step.lo.copy()
    lo[1] += 1
    with pytest.raises(PlanError, match=r"embed_tokens.weight: dim 0: tp=1 gets 5:6 never"):
        verify(with_join(plan, 0, 2, replace(step, lo=lo)))
    lo = lo - np.array([[0], [2]])
    with pytest.raises(PlanError, match=r"tp=1 gets 4:5 once, which is not in its row"):
        verify(with_join(plan, 0, 2, replace(step, lo=lo)))


def test_wrong_ranks_are_refused() -> None:
    plan = make(("fsdp=2", "engine:tp=2"))
    for ranks in ((0, 0), (0,), (0, 1, 2), (-1, 0)):
        with pytest.raises(PlanError, match="are not 2 different ranks"):
            verify(replace(plan, src_ranks=ranks))
    with pytest.raises(PlanError, match=r"lost ranks \[7\] are none of the source ranks"):
        verify(replace(plan, lost=(7,)))


@pytest.mark.parametrize("spec", ["dp=2,fsdp=2", "pp=2,dp=2", "zero3=2,dp=2", "engine:tp=4"])
def test_what_only_lost_ranks_held_is_named_and_nothing_else(spec: str) -> None:
    """Against all pieces of all ranks that are left."""
    for model in every_model()[:2]:
        plan = planned(model, spec, "engine:tp=2")
        held = [pieces_of(plan.src, rank) for rank in range(4)]
        for number in range(1, 2**4):
            lost = tuple(rank for rank in range(4) if number & 1 << rank)
            left = set().union(*(held[rank] for rank in range(4) if rank not in lost))
            dead = {name for name, _ in set().union(*held) - left}
            broken = {key for key in plan.src.model.class_of if any(key in name for name in dead)}
            if not dead:
                verify(replace(plan, lost=lost))
                continue
            with pytest.raises(PlanError) as error:
                verify(replace(plan, lost=lost))
            lines = [line for line in str(error.value).splitlines() if "only lost ranks" in line]
            named = {key for key in plan.src.model.class_of if any(key in line for line in lines)}
            assert named or not broken
            assert named <= broken


def pieces_of(layout: Layout, rank: int) -> set[tuple[str, int]]:
    """Every element that a rank holds."""
    full = labels(layout.model)
    return {
        (piece.name, number)
        for piece in layout.pieces(rank)
        for number in full[piece.name][tuple(slice(*run) for run in piece.box)].ravel().tolist()
    }


def test_a_proof_comes_from_verify_alone() -> None:
    plan = make(ROUTES[0])
    with pytest.raises(TypeError, match="call verify"):
        Proof(object(), plan)
    with pytest.raises(TypeError, match="takes a Proof, got Plan"):
        execute_inprocess(plan, {}, {})  # type: ignore[arg-type]
    proof = verify(plan)
    assert proof.digest == proof.plan.digest == plan.digest
    with pytest.raises(TypeError, match="no subclasses"):
        type("Forged", (Proof,), {"__init__": lambda self: None})
    assert "writes every element of engine:tp=4 once" in str(proof)


def test_what_is_proved_cannot_be_changed() -> None:
    plan = make(ROUTES[0])
    step = plan.flows[0].joins[1]
    unfrozen = with_join(
        plan, 0, 1, replace(step, lo=step.lo.copy(), dst=moved_by_nothing(step.dst))
    )
    proof = verify(unfrozen)
    for name, value in (("plan", plan), ("digest", ""), ("num_boxes", 0), ("other", 1)):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(proof, name, value)
    with pytest.raises(AttributeError, match="cannot be changed"):
        del proof.plan
    assert proof.plan.digest == unfrozen.digest
    proved = proof.plan.flows[0].joins[1]
    for column in (proved.lo, proved.dst.loc):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7


def test_nothing_that_was_kept_of_a_plan_changes_its_proof() -> None:
    """Views of its arrays, and what was derived before the arrays were mended."""
    plan = pickle.loads(pickle.dumps(make(ROUTES[0])))
    step = plan.flows[0].joins[2]
    step = replace(step, **{name: getattr(step, name).copy() for name in ("lo", "holder_row")})
    table = replace(step.dst, loc=step.dst.loc.copy())
    plan = with_join(plan, 0, 2, replace(step, dst=table))
    right = plan.flows[0].joins[2].holder_row.copy()
    step.holder_row[:] = np.roll(right, 1)
    assert plan.flows[0].holders.members[2].part[0] != step.src.part[right[0]]
    step.holder_row[:] = right
    kept = [step.lo[:], step.holder_row[:], table.loc[:]]
    proof = verify(plan)
    for view in kept:
        view[:] = 0
    full, dst = labels(plan.src.model), empty_tensors(plan)
    execute_inprocess(proof, source_tensors(plan, full), dst)
    assert_same(dst, expected_tensors(plan, full))


def test_what_is_derived_from_a_plan_is_read_only() -> None:
    proof = verify(make(ROUTES[2]))
    strips = proof.plan.src.tensors[0].cuts[2].strips
    step = proof.plan.flows[0].joins[2]
    members = [
        getattr(m, name)
        for m in (step.holders, step.consumers)
        for name in ("start", "part", "count", "group", "_key", "_by_part", "_sorted_part")
    ]
    columns = [strips.size, strips.start, strips.loc, strips.length, step.cell_atom]
    for column in (*members, *columns):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7


@pytest.mark.parametrize("dtype", [float, np.int32, np.uint64])
@pytest.mark.parametrize("name", ["lo", "row", "holder_start", "cell"])
def test_columns_are_int64(name: str, dtype: type) -> None:
    """1.0 == 1 to every comparison of the proof, but no slice takes it."""
    plan = make(ROUTES[0])
    step = plan.flows[0].joins[2]
    wrong = replace(step, **{name: getattr(step, name).astype(dtype)})
    with pytest.raises(PlanError, match=f"column {name} is {np.dtype(dtype)}"):
        verify(with_join(plan, 0, 2, wrong))


def test_every_atom_has_holders_of_its_own() -> None:
    """One list of holders for two atoms: numpy would read it for both."""
    plan = planned(tiny_model("qwen3"), "fsdp=1", "engine:tp=2")
    flow = next(i for i, f in enumerate(plan.flows) if len(f.joins[2].lo) == 2)
    step = plan.flows[flow].joins[2]
    two = replace(step, atom_lo=step.lo, atom_hi=step.hi, atom=np.arange(2))
    with pytest.raises(PlanError, match=r"holder_start is int64 \(2,\), it must be int64 \(3,\)"):
        verify(with_join(plan, flow, 2, two))


@pytest.mark.parametrize(
    ("lost", "fault"), [((2, 2), "each once"), ((3, 2), "in order"), ((5,), "in the destination")]
)
def test_lost_ranks_of_a_plan_are_in_order_and_no_destination(
    lost: tuple[int, ...], fault: str
) -> None:
    plan = planned(tiny_model(), "dp=4", "engine:replicas=2", lost=[2])
    with pytest.raises(PlanError, match=fault):
        verify(replace(plan, lost=lost))


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


def moved_by_nothing(table: Table) -> Table:
    return replace(table, loc=table.loc.copy())


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


def test_a_copied_or_unpickled_proof_is_verified_again() -> None:
    plan = make(ROUTES[1])
    proof = verify(plan)
    for again in (pickle.loads(pickle.dumps(proof)), copy.deepcopy(proof)):
        assert again.digest == proof.digest
        full, dst = labels(plan.src.model), empty_tensors(plan)
        execute_inprocess(again, source_tensors(plan, full), dst)
        assert_same(dst, expected_tensors(plan, full))
    broken = with_join(plan, 0, 2, with_pairs(plan.flows[0].joins[2], [0]))
    object.__setattr__(proof, "plan", broken)  # as in a pickle that was tampered with
    with pytest.raises(PlanError):
        pickle.loads(pickle.dumps(proof))


def test_numbers_of_a_plan_cannot_be_changed_in_place() -> None:
    step = make(ROUTES[0]).flows[0].joins[1]
    with pytest.raises(ValueError, match="read-only"):
        step.lo[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        step.dst.loc[0] = 7
    assert isinstance(step.lo, np.ndarray)
