"""Tensor parallelism: how it cuts a dim, by what the dim means; no rule names a tensor. Floor 1.

Called by the schemes, and by `parallel.tp_plan`, which runs the same rules.

    q, mla_kv, mla_v, ...intermediate    equal parts, of whole heads
    kv            equal parts while tp <= kv heads; then rank t has kv head t // (tp / kv heads)
    vocab         chunks of ceil(n / tp)
    all others    whole on every rank: norms (also under sequence parallelism, which cuts
                  activations alone), routers, latent projections, the rank of a LoRA factor

The scales of FP8 blocks have those of the blocks that the weight's part touches, so where a part
ends within a block both neighbours hold its scale.
"""

from collections.abc import Sequence
from math import prod

from shardloop.families.base import CanonicalModel, Dim
from shardloop.layout.parse import MOST_RANKS
from shardloop.layout.strips import Strips, blocks, cat, pick, split, whole
from shardloop.layout.tables import Axis, Cut

UNITS = {
    "q": "num_heads",
    "kv": "num_kv_heads",
    "mla_kv": "num_heads",
    "mla_v": "num_heads",
    "intermediate": "intermediate_size",
    "expert_intermediate": "moe_intermediate_size",
    "shared_intermediate": "shared_intermediate_size",
}
"""Meanings that must come out even, and what their units are called in messages."""
CUT_BY_TP = (*UNITS, "vocab")
OF_EXPERTS = ("expert_intermediate",)


def tp_cut(
    model: CanonicalModel, dim: int, members: Sequence[tuple[str, Dim]], tp: Axis | None
) -> Cut:
    """The cut of canonical dim `dim`, along which the members lie one after the other.

    Args:
        members: key (or OWN) and dim of each.
    """
    axes = (tp,) if tp is not None and members[0][1].meaning in CUT_BY_TP else ()
    num_parts = prod(axis.size for axis in axes)
    parts = [tp_strips(model, key, member, num_parts) for key, member in members]
    return Cut((dim,), axes, cat(*parts))


def tp_strips(model: CanonicalModel, key: str, dim: Dim, tp: int) -> Strips:
    """What each of `tp` ranks has of a dim that tensor parallelism cuts."""
    strips = whole(key, (0, model.sizes[dim.meaning]))
    copies = max(1, tp // model.units["kv"]) if dim.meaning == "kv" else 1
    strips = pick(split(strips, tp // copies), [[t // copies] for t in range(tp)])
    return blocks(strips, dim.block)


def tp_faults(model: CanonicalModel, axis: str, size: int, meanings: Sequence[str]) -> list[str]:
    """Why `size` ranks of `axis` cannot share these meanings, and which sizes can; none if so."""
    faults = _unit_faults(model, axis, size, meanings)
    if not faults:
        return []
    most = max(model.units[meaning] for meaning in meanings if meaning in model.units)
    most = min(most, MOST_RANKS)
    allowed = [str(n) for n in range(1, most + 1) if not _unit_faults(model, axis, n, meanings)]
    return [f"{', '.join(faults)}; choose {axis} from {', '.join(allowed)}"]


def _unit_faults(
    model: CanonicalModel, axis: str, size: int, meanings: Sequence[str]
) -> dict[str, None]:
    faults: dict[str, None] = {}
    for meaning in meanings:
        units = model.units.get(meaning, 0)
        is_copied = meaning == "kv" and size > units and size % units == 0
        if units % size and not is_copied:
            multiple = ", nor is it a multiple of," if meaning == "kv" and size > units else ""
            faults[f"{axis}={size} does not divide{multiple} {UNITS[meaning]}={units}"] = None
    return faults
