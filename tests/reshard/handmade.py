"""Random models, and random layouts written as strips by hand: wider than what any scheme makes.

Pipeline stages, experts over ranks, flat partitions, uneven and empty parts, parts that overlap,
stacked experts and tied heads, in any product on a mesh whose axes have any order.
"""

from dataclasses import replace
from random import Random

import numpy as np

from shardloop.families import CanonicalModel
from shardloop.families.base import Dim, TensorClass
from shardloop.layout import Layout
from shardloop.layout.layout import LocalTensor
from shardloop.layout.strips import OWN, Strips, pad, split, whole
from shardloop.layout.tables import Axis, Cut, Mesh, make_mesh
from tests.layout.reference import tiny_model

LAYERS = "model.layers.{layer}."


def random_model(rng: Random) -> CanonicalModel:
    """Matrices, vectors, experts and, tied or not, an embedding; some kept in float32."""
    num_layers, num_experts = rng.randint(1, 5), rng.randint(2, 5)
    every, tied = (0, num_layers), rng.random() < 0.5

    def dims() -> tuple[Dim, ...]:
        return tuple(Dim("hidden", rng.randint(1, 7)) for _ in range(rng.randint(1, 3)))

    classes = [
        TensorClass(key="embed", template="embed", layers=(-1, 0), dims=dims()),
        TensorClass(key="matrix", template=LAYERS + "matrix", layers=every, dims=dims()),
        TensorClass(
            key="bias", template=LAYERS + "bias", layers=every, dims=dims(), dtype="float32"
        ),
        TensorClass(
            key="experts.{expert}.up",
            template=LAYERS + "experts.{expert}.up",
            layers=(rng.randrange(num_layers), num_layers),
            experts=(0, num_experts),
            dims=dims(),
        ),
        TensorClass(key="norm", template="norm", layers=(num_layers, num_layers + 1), dims=dims()),
    ]
    return replace(
        tiny_model(num_hidden_layers=num_layers), name="random", tied=tied, classes=tuple(classes)
    )


def random_layout(model: CanonicalModel, rng: Random) -> Layout:
    sizes = [(name, rng.choice([1, 1, 2, 2, 3])) for name in ("pp", "ep", "dp", "fsdp", "tp")]
    rng.shuffle(sizes)
    mesh = make_mesh(tuple(sizes))
    axis = {a.name: a for a in mesh}
    tensors = []
    for c in model.classes:
        tensors.append(_tensor(model, c, mesh, axis, rng))
        if c.key == "embed" and model.tied:
            tensors.append(_head(model, tensors[-1], axis))
    return Layout(spec=f"random:{rng.random()}", model=model, mesh=mesh, tensors=tuple(tensors))


def stages(layers: tuple[int, int], num_layers: int, pp: Axis) -> Cut:
    """Consecutive layers on each stage, those outside 0..num_layers on the first and last."""
    of_layer = np.clip(np.arange(*layers), 0, num_layers - 1) * pp.size // num_layers
    of_layer[np.arange(*layers) == num_layers] = pp.size - 1
    part = np.sort(of_layer)
    lo = np.arange(*layers)[:, None]
    return Cut((0,), (pp,), Strips(pp.size, (OWN,), part, np.zeros_like(part), lo, lo + 1))


def _head(model: CanonicalModel, embed: LocalTensor, axis: dict[str, Axis]) -> LocalTensor:
    """The embedding again on the last stage, as its output layer."""
    pp = axis["pp"]
    last = np.full(1, pp.size - 1)
    strips = Strips(
        pp.size, (OWN,), last, np.zeros(1, int), np.full((1, 1), -1), np.zeros((1, 1), int)
    )
    return replace(embed, template="head", cuts=(Cut((0,), (pp,), strips), *embed.cuts[1:]))


def _tensor(
    model: CanonicalModel, c: TensorClass, mesh: Mesh, axis: dict[str, Axis], rng: Random
) -> LocalTensor:
    layers, experts, *own = c.domain
    expert_axes = (axis["ep"],) if experts != (0, 1) else ()
    expert = split(whole(OWN, experts), axis["ep"].size if expert_axes else 1)
    stacked = experts != (0, 1) and rng.random() < 0.5
    cuts = [stages(layers, model.num_layers, axis["pp"]), Cut((1,), expert_axes, expert)]
    axes = [a for a in (axis["tp"], axis["fsdp"]) if rng.random() < 0.8]
    if rng.random() < 0.4:
        cuts.append(_cut(tuple(range(2, 2 + len(own))), own, tuple(axes), rng))
    else:
        of_dim: list[list[Axis]] = [[] for _ in own]
        for a in axes:
            rng.choice(of_dim).append(a)
        cuts += [_cut((2 + i,), [run], tuple(of_dim[i]), rng) for i, run in enumerate(own)]
    return LocalTensor(
        template=c.template.replace("{expert}.", "") if stacked else c.template,
        keys=(c.key,),
        mesh=mesh,
        cuts=tuple(cuts),
        stacked=stacked,
    )


def _cut(dims: tuple[int, ...], runs: list[tuple[int, int]], axes: Mesh, rng: Random) -> Cut:
    strips = whole(OWN, *runs)
    for a in axes:
        strips = split(strips, a.size)
    if len(dims) == 1 and rng.random() < 0.3:
        strips = _widened(strips, runs[0][1])
    if rng.random() < 0.3:
        strips = pad(strips, int(strips.length.max()) + rng.randint(0, 1))
    return Cut(dims, axes, strips)


def _widened(strips: Strips, size: int) -> Strips:
    """Each segment with one element more at either end: neighbours overlap."""
    lo, hi = np.maximum(strips.lo - 1, 0), np.minimum(strips.hi + 1, size)
    return Strips(strips.num_parts, strips.keys, strips.part.copy(), strips.key.copy(), lo, hi)
