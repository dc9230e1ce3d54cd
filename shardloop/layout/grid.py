"""The meshes of a layout: one for dense tensors, one for routed experts. Called by schemes.

Floor 1.

Both factor the same ranks. pp, dp and replicas are axes of both; within them a *block* of ranks
holds one copy of the tensors, cut by fsdp and tp where dense and by ep and etp where experts':

    dense      pp  dp  [copies   fsdp  tp ]      block = the larger of fsdp x tp and ep x etp,
    experts    pp  dp  [fsdp     ep    etp]      which must be a multiple of the smaller

What is over is copies, or for experts under fsdp or zero3 as many chunks of what ep and etp leave
(as torchtitan: `fsdp x tp = efsdp x ep x etp`). So `megatron:pp=16,ep=64,dp=2` has 16 x 2 x 64
ranks, Megatron's data-parallel size being dp x block / tp, and `engine:replicas=32,ep=64,tp=8`
has 32 x 64. Without ep and etp, experts are cut as dense tensors are.

Where etp is left out, each expert of a rank is whole (etp=1), but for `megatron`, which then cuts
experts as tp cuts dense tensors (`ModelParallelConfig.expert_tensor_parallel_size`).
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardloop.errors import LayoutError
from shardloop.families.base import TensorClass
from shardloop.layout.parse import MOST_FLAT_RANKS, MOST_RANKS, WITHOUT_RANKS, LayoutSpec
from shardloop.layout.tables import Axis, Mesh, make_mesh

DENSE = ("fsdp", "zero3", "tp")
EXPERT = ("ep", "etp")
COPIES = "copies"

Sizes = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Grid:
    """A factorisation of all ranks, and its axes by what they do."""

    mesh: Mesh

    @property
    def pp(self) -> Axis | None:
        return self._axis("pp")

    @property
    def ep(self) -> Axis | None:
        return self._axis("ep")

    @property
    def tp(self) -> Axis | None:
        """Cuts heads and width; for experts that have axes of their own it is etp."""
        return self._axis("tp", "etp")

    @property
    def fsdp(self) -> Axis | None:
        return self._axis("fsdp")

    @property
    def zero3(self) -> Axis | None:
        return self._axis("zero3")

    def _axis(self, *names: str) -> Axis | None:
        return next((axis for axis in self.mesh if axis.name in names), None)


class Grids(NamedTuple):
    dense: Grid
    expert: Grid

    def of(self, tensor_class: TensorClass) -> Grid:
        return self.expert if is_expert(tensor_class) else self.dense


def is_expert(tensor_class: TensorClass) -> bool:
    """Does every routed expert have such a tensor?"""
    return "{expert}" in tensor_class.key


def make_grids(spec: LayoutSpec) -> Grids:
    """The meshes of a layout string.

    Raises:
        LayoutError: the block's axes do not stand together, or do not fit; too many ranks.
    """
    axes = [axis for axis in spec.axes if axis[0] not in WITHOUT_RANKS]
    if any(spec.names(name) for name in EXPERT):
        dense, expert = _folded(spec, axes)
    else:
        dense = expert = axes
    num_ranks = prod(size for _, size in dense)
    most = MOST_FLAT_RANKS if spec.names("zero3") else MOST_RANKS
    if num_ranks > most:
        raise LayoutError(f"layout {spec} has {num_ranks} ranks; choose at most {most}")
    return Grids(Grid(make_mesh(tuple(dense))), Grid(make_mesh(tuple(expert))))


def expert_tp(spec: LayoutSpec) -> int:
    """How many ways the width of each expert is cut."""
    own_axes = spec.names("ep") or spec.names("etp")
    follows = not own_axes or (spec.scheme == "megatron" and not spec.names("etp"))
    return spec.size("tp" if follows else "etp")


def _folded(spec: LayoutSpec, axes: Sizes) -> tuple[Sizes, Sizes]:
    before, block, after = _around_block(spec, axes)
    dense = [axis for axis in block if axis[0] in DENSE]
    expert = [axis for axis in block if axis[0] in EXPERT]
    if not spec.names("etp"):
        expert.append(("etp", expert_tp(spec)))
    num_dense, num_expert = (prod(size for _, size in part) for part in (dense, expert))
    size = max(num_dense, num_expert)
    if size % num_dense or size % num_expert:
        raise LayoutError(
            f"layout {spec}: experts are on {num_expert} ranks ({_product(expert)}), dense tensors "
            f"on {num_dense} ({_product(dense)}); choose sizes of which one divides the other"
        )
    chunks = next((name for name, _ in dense if name != "tp"), COPIES)
    dense = [(COPIES, size // num_dense), *dense]
    expert = [(chunks, size // num_expert), *expert]
    return [*before, *dense, *after], [*before, *expert, *after]


def _around_block(spec: LayoutSpec, axes: Sizes) -> tuple[Sizes, Sizes, Sizes]:
    inside = [i for i, (name, _) in enumerate(axes) if name in (*DENSE, *EXPERT)]
    first, last = inside[0], inside[-1] + 1
    between = [name for name, _ in axes[first:last] if name not in (*DENSE, *EXPERT)]
    if between:
        raise LayoutError(
            f"layout {spec}: {', '.join(between)} stands between axes that share ranks; name "
            f"{', '.join(name for name, _ in axes if name in (*DENSE, *EXPERT))} side by side"
        )
    return axes[:first], axes[first:last], axes[last:]


def _product(axes: Sizes) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes) or "1"
