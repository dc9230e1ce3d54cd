"""`make_layout`, the door: a layout string and a model's shapes make a layout. Floor 1.

Each scheme has a file that says which local tensors there are; here the request is checked.
"""

from collections.abc import Callable, Iterator

from shardloop.errors import LayoutError
from shardloop.families.base import CanonicalModel
from shardloop.layout.engine import engine_tensors
from shardloop.layout.grid import expert_tp, make_grids
from shardloop.layout.hf import hf_tensors
from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.megatron import megatron_faults, megatron_tensors
from shardloop.layout.parse import MOST_RANKS, LayoutSpec, parse_layout
from shardloop.layout.stages import stage_faults
from shardloop.layout.tp import OF_EXPERTS, UNITS, tp_faults

SCHEMES: dict[str, Callable[[CanonicalModel, LayoutSpec], Iterator[LocalTensor]]] = {
    "hf": hf_tensors,
    "megatron": megatron_tensors,
    "engine": engine_tensors,
}
UNEVEN_EXPERTS = ("hf",)
"""Schemes whose ranks may have different numbers of experts."""


def make_layout(model: CanonicalModel, spec: str) -> Layout:
    """The layout a string such as `fsdp=4`, `megatron:pp=2,tp=2` or `engine:tp=4` describes.

    The outermost axis comes first: in `fsdp=2,tp=2` ranks 0 and 1 differ in tp.

    Raises:
        LayoutError: the string is not a layout, or does not fit the model's layers, heads, width
            or experts; all faults are named.
    """
    parsed = parse_layout(spec)
    dense, _ = make_grids(parsed)
    faults = _faults(model, parsed)
    if faults:
        raise LayoutError("; ".join(faults))
    tensors = SCHEMES[parsed.scheme](model, parsed)
    return Layout(spec=str(parsed), model=model, mesh=dense.mesh, tensors=tuple(tensors))


def _faults(model: CanonicalModel, spec: LayoutSpec) -> list[str]:
    tp, etp = spec.size("tp"), expert_tp(spec)
    has = [meaning for meaning in UNITS if meaning in model.units]
    of_experts = [meaning for meaning in has if meaning in OF_EXPERTS]
    dense = [meaning for meaning in has if meaning not in of_experts]
    if spec.names("ep") or spec.names("etp"):
        faults = tp_faults(model, "tp", tp, dense) + tp_faults(model, "etp", etp, of_experts)
    else:
        faults = tp_faults(model, "tp", tp, has)
    faults += stage_faults(model, spec.size("pp"), spec.size("vpp"))
    faults += _expert_faults(model, spec)
    if spec.scheme == "megatron" and not faults:
        faults = megatron_faults(model, tp)
    return faults


def _expert_faults(model: CanonicalModel, spec: LayoutSpec) -> list[str]:
    named = [name for name in ("ep", "etp") if spec.names(name)]
    num_experts, ep = model.sizes.get("experts", 0), spec.size("ep")
    if named and not num_experts:
        return [f"model {model.name} has no experts; leave {' and '.join(named)} out"]
    if ep > max(num_experts, 1):
        return [f"ep={ep} is more than the {num_experts} experts; choose ep up to {num_experts}"]
    if spec.scheme not in UNEVEN_EXPERTS and num_experts % ep:
        most = min(num_experts, MOST_RANKS)
        allowed = [str(n) for n in range(1, most + 1) if num_experts % n == 0]
        return [
            f"ep={ep} does not divide num_experts={num_experts}; choose ep from "
            f"{', '.join(allowed)}"
        ]
    return []
