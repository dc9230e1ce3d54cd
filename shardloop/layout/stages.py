"""Pipeline stages: which layers a rank has, and which experts. Called by the schemes. Floor 1.

Stages are chunks of ceil(layers / pp) consecutive layers, so only the last may have fewer. The
embedding (layer -1) is with the first stage, final norm and head (layer L) are with the last. With
`vpp` chunks on each, stage p has chunks p, p + pp, p + 2 pp, ...
"""

from shardloop.families.base import CanonicalModel, TensorClass
from shardloop.layout.strips import OWN, Strips, clip, pick, split, whole
from shardloop.layout.tables import Axis, Cut


def layer_cut(
    model: CanonicalModel,
    layers: tuple[int, int],
    pp: Axis | None,
    *,
    vpp: int = 1,
    at_end: bool = False,
) -> Cut:
    """Which of a class's `layers` each stage has; its others are padding, so places count layers.

    Args:
        at_end: put them on the last stage, wherever they are: a copy of the embedding as head.
    """
    num_stages = 1 if pp is None else pp.size
    axes = () if pp is None else (pp,)
    first, last = layers[1] <= 0, layers[0] >= model.num_layers
    if first or last:
        stage = num_stages - 1 if last or at_end else 0
        order = [[0] if p == stage else [] for p in range(num_stages)]
        return Cut((0,), axes, pick(whole(OWN, layers), order))
    return Cut((0,), axes, clip(_stages(model.num_layers, num_stages, vpp), *layers))


def expert_cut(tensor_class: TensorClass, ep: Axis | None) -> Cut:
    """Chunks of ceil(experts / ep) consecutive experts; all of them where nothing cuts them."""
    experts = whole(OWN, tensor_class.experts)
    if ep is None:
        return Cut((1,), (), experts)
    return Cut((1,), (ep,), split(experts, ep.size))


def stage_faults(model: CanonicalModel, pp: int, vpp: int) -> list[str]:
    """Why so many stages cannot have the model's layers, and which can; none if so."""
    num_layers = model.num_layers
    if vpp > 1 and num_layers % (pp * vpp):
        allowed = [str(n) for n in range(1, num_layers + 1) if num_layers % (pp * n) == 0]
        choice = f"choose vpp from {', '.join(allowed)}" if allowed else "leave vpp out"
        return [f"pp={pp} x vpp={vpp} does not divide num_layers={num_layers}; {choice}"]
    if _has_idle_stage(num_layers, pp):
        allowed = [str(n) for n in range(1, num_layers + 1) if not _has_idle_stage(num_layers, n)]
        return [
            f"pp={pp} leaves a stage without any of num_layers={num_layers}, in chunks of "
            f"{-(-num_layers // pp)}; choose pp from {', '.join(allowed)}"
        ]
    return []


def _has_idle_stage(num_layers: int, pp: int) -> bool:
    return (pp - 1) * -(-num_layers // pp) >= num_layers


def _stages(num_layers: int, pp: int, vpp: int) -> Strips:
    chunks = split(whole(OWN, (0, num_layers)), pp * vpp)
    return pick(chunks, [range(stage, pp * vpp, pp) for stage in range(pp)])
