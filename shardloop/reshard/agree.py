"""Do two layouts speak of the same model, and do the ranks fit them? Floor 1.

Called by `plan_reshard` before anything is planned.
"""

from collections.abc import Iterator

from shardloop.errors import PlanError
from shardloop.families.base import CanonicalModel
from shardloop.layout.layout import Layout

MOST_LISTED = 20


def check_ranks(
    src: Layout,
    src_ranks: tuple[int, ...],
    dst: Layout,
    dst_ranks: tuple[int, ...],
    lost: tuple[int, ...],
) -> None:
    """
    Raises:
        PlanError: a layout does not have as many different ranks >= 0, or a lost rank is not in the
            source, or is in the destination.
    """
    faults = [
        f"{name}={list(ranks)} does not fit layout {layout.spec}; "
        f"give {layout.world_size} different ranks >= 0"
        for name, layout, ranks in (("src_ranks", src, src_ranks), ("dst_ranks", dst, dst_ranks))
        if len(ranks) != layout.world_size
        or len(set(ranks)) != len(ranks)
        or min(ranks, default=0) < 0
    ]
    if unknown := sorted(set(lost) - set(src_ranks)):
        faults.append(f"lost={unknown} are not in src_ranks; only source ranks can be lost")
    if kept := sorted(set(lost) & set(dst_ranks)):
        faults.append(f"lost={kept} are in dst_ranks; give the destination other ranks")
    if faults:
        raise PlanError("\n".join(faults))


def check_models(src: Layout, dst: Layout) -> None:
    """
    Raises:
        PlanError: the models differ in names, shapes, dtypes or heads, or a layout shows no tensor
            of some class. It names what differs on both sides, of each kind the first ones.
    """
    lines = [*_model_faults(src.model, dst.model), *_unshown("source", src)]
    lines += _unshown("destination", dst)
    if lines:
        raise PlanError(
            f"{src.model.name} in layout {src.spec} and {dst.model.name} in layout {dst.spec} are "
            "not the same model; make both layouts from one config:\n" + "\n".join(lines)
        )


def _model_faults(src: CanonicalModel, dst: CanonicalModel) -> Iterator[str]:
    if _classes(src) != _classes(dst):
        here, there = _tensors(src), _tensors(dst)
        yield from _named("only in the source", [name for name in here if name not in there])
        yield from _named("only in the destination", [name for name in there if name not in here])
        for what, index in (("shapes", 0), ("dtypes", 1), ("keys", 2)):
            differ = [
                f"{name} {a[index]} -> {there[name][index]}"
                for name, a in here.items()
                if name in there and a[index] != there[name][index]
            ]
            yield from _named(f"of different {what}", differ)
    sizes = [
        f"{name} {getattr(src, name)} -> {getattr(dst, name)}"
        for name in ("num_heads", "num_kv_heads", "head_dim")
        if getattr(src, name) != getattr(dst, name)
    ]
    yield from _named("different sizes", sizes)


def _classes(model: CanonicalModel) -> list[tuple[object, ...]]:
    classes = sorted(model.classes, key=lambda c: c.key)
    return [(c.key, c.template, c.layers, c.experts, c.shape, c.dtype) for c in classes]


def _tensors(model: CanonicalModel) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """Shape, dtype and key of the class of every tensor."""
    return {
        c.name(layer, expert): (c.shape, c.dtype or "the model's", c.key)
        for c in model.classes
        for layer in range(*c.layers)
        for expert in range(*c.experts)
    }


def _unshown(side: str, layout: Layout) -> list[str]:
    shown = {key for tensor in layout.tensors for key in tensor.keys}
    classes = [c for c in layout.model.classes if c.key not in shown]
    return _named(f"shown by no tensor of the {side}", [c.template for c in classes])


def _named(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    lines = [f"  {title} ({len(items)}):", *(f"    {item}" for item in items[:MOST_LISTED])]
    if len(items) > MOST_LISTED:
        lines.append(f"    and {len(items) - MOST_LISTED} more")
    return lines
