"""A model as a few classes of tensors, and the meaning of each of their dims.

Made by `families.table`; read by everything that asks for a tensor's name or shape. Floor 1.

All tensors that differ only in their layer and expert are one `TensorClass`, with these two as
further dims: planning a model of 100 layers and 256 experts is planning two dozen classes. What
comes before the layers (the embedding) lies in layer -1, what comes after them (final norm, head)
in layer L; what is no expert's is that of expert 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardloop.errors import ModelError

LAYER_PREFIX = "model.layers.{layer}."

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of an element, by the dtypes that a class may name."""
MOST_ELEMENTS = 2**44 - 1
"""Plans, proofs and costs count in 64 bits: the bytes of so many elements of 8 bytes, on each of
`layout.parse.MOST_RANKS` ranks, come to less than 2^63."""


class Dim(NamedTuple):
    """One dim of a tensor: what it counts, and how many elements it has.

    A layout cuts by meaning, so it needs no rule per tensor. A meaning has one size in a model:

        vocab, hidden, experts (what the router tells apart), lora_rank
        intermediate, expert_intermediate (of one expert), shared_intermediate
        q, kv          query heads, kv heads x their size; head_dim
        mla_kv, mla_v  query heads x what latent attention makes for each: k and v, v alone
        q_latent, kv_latent, kv_latent_rope    what it makes them from: nothing of a single head
    """

    meaning: str
    size: int
    block: int = 1
    """How many elements of the meaning one element stands for: 128 for the scales of FP8 blocks."""


NUM_NUMBERS = 2
"""Dims of every class that are numbers in its name: the layer and the expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorClass:
    """All tensors of a model that are alike but for their layer and expert."""

    key: str
    """Name within the layer, such as `self_attn.q_proj.weight`: unique in its model. Has `{expert}`
    if each expert has such a tensor."""
    template: str
    """Full name; `{layer}` and `{expert}` stand for the numbers where there are any."""
    layers: tuple[int, int]
    """First layer, and one past the last."""
    experts: tuple[int, int] = (0, 1)
    dims: tuple[Dim, ...]
    dtype: str | None = None
    """Name of a torch dtype in which the tensor is kept whatever the model's; None: the model's."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def domain(self) -> tuple[tuple[int, int], ...]:
        """The box of all elements: layers and experts first, then each dim from 0."""
        return (self.layers, self.experts, *((0, dim.size) for dim in self.dims))

    @property
    def num_elements(self) -> int:
        """Of all tensors of the class."""
        return prod(hi - lo for lo, hi in self.domain)

    @property
    def is_linear(self) -> bool:
        """Is it the weight of a linear map within the layers? The router's is not counted."""
        meanings = {dim.meaning for dim in self.dims}
        return (
            self.key.endswith(".weight")
            and len(self.dims) == 2
            and not meanings & {"vocab", "experts", "lora_rank"}
        )

    def name(self, layer: int, expert: int = 0) -> str:
        return self.template.format(layer=layer, expert=expert)


@dataclass(frozen=True, kw_only=True)
class CanonicalModel:
    """A model as its Hugging Face state dict: names, shapes and the meaning of each dim.

    With tied embeddings there is no `lm_head.weight`: the head uses `model.embed_tokens.weight`.

    Raises:
        ModelError: it has more than `MOST_ELEMENTS` elements.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    sizes: Mapping[str, int]
    """By meaning of a dim, for those that occur: how many elements it has in all."""
    units: Mapping[str, int]
    """By the same meanings: how many parts it has that no layout may cut (heads, else elements)."""
    classes: tuple[TensorClass, ...]

    def __post_init__(self) -> None:
        if self.num_parameters > MOST_ELEMENTS:
            largest = max(self.classes, key=lambda c: c.num_elements)
            raise ModelError(
                f"model {self.name} has {self.num_parameters:,} elements, most of them "
                f"{largest.template} {list(largest.shape)}; choose sizes for at most "
                f"{MOST_ELEMENTS:,}"
            )

    @cached_property
    def class_of(self) -> dict[str, TensorClass]:
        return {tensor_class.key: tensor_class for tensor_class in self.classes}

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors, buffers and scales included."""
        return sum(c.num_elements for c in self.classes)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of all tensors, with `itemsize` for each element kept in the model's own dtype."""
        return sum(
            c.num_elements * (itemsize if c.dtype is None else ITEMSIZE[c.dtype])
            for c in self.classes
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the state dict, layer by layer."""
        return {name: c.shape for name, c in by_name(self.classes)}


def by_name(classes: Sequence[TensorClass]) -> Iterator[tuple[str, TensorClass]]:
    """Every tensor's name and class: lower layers first, then by class, then by expert."""
    pairs = [(layer, i) for i, c in enumerate(classes) for layer in range(*c.layers)]
    for layer, index in sorted(pairs):
        for expert in range(*classes[index].experts):
            yield classes[index].name(layer, expert), classes[index]
