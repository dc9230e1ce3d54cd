"""The layouts we know, written as strips: `hf` and `engine`. `make_layout` is the door. Floor 1.

A scheme says, for each meaning of a dim, how tensor parallelism cuts it; no rule names a tensor.

    q, intermediate   equal parts
    kv                equal parts while tp <= kv heads; then rank t has kv head t // (tp / kv heads)
    vocab             chunks of ceil(n / tp); the engine pads the last ones
    anything else     whole on every tp rank
"""

from collections.abc import Callable, Iterator

from shardloop.errors import LayoutError
from shardloop.families.base import CanonicalModel, Dim, TensorClass
from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.parse import parse_layout
from shardloop.layout.strips import OWN, Strip, cat, length, pad, split, whole
from shardloop.layout.tables import Axis, Cut, make_mesh

CUT_BY_TP = ("q", "kv", "intermediate", "vocab")
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""What an engine keeps in one tensor, in the order of its rows on each rank."""


def make_layout(model: CanonicalModel, spec: str) -> Layout:
    """The layout a string such as `fsdp=4`, `dp=2,fsdp=2,tp=2` or `engine:tp=4` describes.

    The outermost axis comes first: in `fsdp=2,tp=2` ranks 0 and 1 differ in tp.

    Raises:
        LayoutError: the string is not a layout, or tp does not fit the model's heads or width.
    """
    parsed = parse_layout(spec)
    _check_tp(model, parsed.size("tp"))
    mesh = make_mesh(parsed.axes)
    tensors = SCHEMES[parsed.scheme](model, mesh)
    return Layout(spec=str(parsed), model=model, mesh=mesh, tensors=tuple(tensors))


def _check_tp(model: CanonicalModel, tp: int) -> None:
    faults = _tp_faults(model, tp)
    if faults:
        allowed = [n for n in range(1, model.num_heads + 1) if not _tp_faults(model, n)]
        raise LayoutError(f"{faults[0]}; choose tp from {', '.join(map(str, allowed))}")


def _tp_faults(model: CanonicalModel, tp: int) -> list[str]:
    faults = []
    num_kv_heads = model.num_kv_heads
    if model.num_heads % tp:
        faults.append(f"tp={tp} does not divide num_heads={model.num_heads}")
    if num_kv_heads % tp and tp % num_kv_heads:
        relation = "divide" if tp < num_kv_heads else "divide, nor is it a multiple of,"
        faults.append(f"tp={tp} does not {relation} num_kv_heads={num_kv_heads}")
    if model.intermediate_size % tp:
        faults.append(f"tp={tp} does not divide intermediate_size={model.intermediate_size}")
    return faults


def _tp_strips(model: CanonicalModel, key: str, dim: Dim, tp: int) -> list[Strip]:
    """What each tp rank has of a dim that tp cuts."""
    strip = whole(key, 0, dim.size)
    if dim.meaning != "kv":
        return split(strip, tp)
    copies = max(1, tp // model.num_kv_heads)
    heads = split(strip, tp // copies)
    return [heads[t // copies] for t in range(tp)]


def _tp_cut(model: CanonicalModel, members: list[tuple[str, Dim]], tp: Axis | None) -> Cut:
    """The cut of a dim along which the members lie one after the other on each rank."""
    if tp is None or members[0][1].meaning not in CUT_BY_TP:
        return Cut((), (cat(*(whole(key, 0, dim.size) for key, dim in members)),))
    parts = [_tp_strips(model, key, dim, tp.size) for key, dim in members]
    return Cut((tp,), tuple(cat(*strips) for strips in zip(*parts, strict=True)))


def _layer_cut(tensor_class: TensorClass) -> Cut:
    return Cut((), (whole(OWN, *tensor_class.layers),))


def _hf_tensors(model: CanonicalModel, mesh: tuple[Axis, ...]) -> Iterator[LocalTensor]:
    """Every tensor under its own name: tp cuts first, fsdp then chunks dim 0 of what is left."""
    axis_of = {axis.name: axis for axis in mesh}
    tp, fsdp = axis_of.get("tp"), axis_of.get("fsdp")
    for c in model.classes:
        cuts = [_tp_cut(model, [(OWN, dim)], tp) for dim in c.dims]
        if fsdp is not None:
            cuts[0] = _chunked(cuts[0], fsdp)
        yield LocalTensor(template=c.template, keys=(c.key,), cuts=(_layer_cut(c), *cuts))


def _chunked(cut: Cut, fsdp: Axis) -> Cut:
    chunks = tuple(chunk for strip in cut.strips for chunk in split(strip, fsdp.size))
    return Cut((*cut.axes, fsdp), chunks)


def _engine_tensors(model: CanonicalModel, mesh: tuple[Axis, ...]) -> Iterator[LocalTensor]:
    """qkv and gate/up fused on each rank, the vocabulary padded to a multiple of tp."""
    tp = {axis.name: axis for axis in mesh}.get("tp")
    for template, group in _engine_groups(model):
        first = group[0]
        members = [(c.key if len(group) > 1 else OWN, c.dims[0]) for c in group]
        cuts = [_tp_cut(model, members, tp)]
        cuts += [_tp_cut(model, [(OWN, dim)], tp) for dim in first.dims[1:]]
        if first.dims[0].meaning == "vocab":
            cuts[0] = _padded(cuts[0])
        keys = tuple(c.key for c in group)
        yield LocalTensor(template=template, keys=keys, cuts=(_layer_cut(first), *cuts))


def _padded(cut: Cut) -> Cut:
    """Every rank gets as many rows as the first: what is missing is padding."""
    size = length(cut.strips[0])
    return Cut(cut.axes, tuple(pad(strip, size) for strip in cut.strips))


def _engine_groups(model: CanonicalModel) -> Iterator[tuple[str, list[TensorClass]]]:
    """Local name template and the classes it fuses, in the order of each group's first class."""
    fused_of = {member: fused for fused, members in FUSED.items() for member in members}
    done: set[str] = set()
    for c in model.classes:
        stem, _, kind = c.key.rpartition(".")
        if stem not in fused_of:
            yield c.template, [c]
            continue
        fused = fused_of[stem]
        template = c.template.replace(stem, fused)
        if template in done:
            continue
        done.add(template)
        keys = [f"{member}.{kind}" for member in FUSED[fused]]
        missing = [key for key in keys if key not in model.class_of]
        if missing:
            raise LayoutError(
                f"the engine fuses {', '.join(keys)} but model {model.name} has no "
                f"{', '.join(missing)}; add them to the family's table"
            )
        yield template, [model.class_of[key] for key in keys]


SCHEMES: dict[str, Callable[[CanonicalModel, tuple[Axis, ...]], Iterator[LocalTensor]]] = {
    "hf": _hf_tensors,
    "engine": _engine_tensors,
}
