"""What a family's table says about a model: its tensors, and the meaning of each of their dims.

Called by `shardloop.families.canonical_model` and by everything that asks for a tensor's name or
shape. Floor 1.

All tensors that differ only in their layer number are one `TensorClass`, with the layer as a
further dim: planning a model of 100 layers is planning a dozen classes. What comes before the
layers (the embedding) lies in layer -1, what comes after them (final norm, head) in layer L.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardloop.errors import ModelError
from shardloop.families.fields import Fields

LAYER_PREFIX = "model.layers.{layer}."


class Dim(NamedTuple):
    """One dim of a tensor: what it counts, and how many elements it has.

    `meaning` is one of vocab, hidden, q (query heads x head_dim), kv (kv heads x head_dim),
    head_dim, intermediate. A layout cuts by meaning, so it needs no rule per tensor.
    """

    meaning: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorClass:
    """All tensors of a model that are alike but for their layer."""

    key: str
    """Name within the layer, such as `self_attn.q_proj.weight`: unique in its model."""
    template: str
    """Full name; `{layer}` stands for the layer number where there is one."""
    layers: tuple[int, int]
    """First layer, and one past the last."""
    dims: tuple[Dim, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def domain(self) -> tuple[tuple[int, int], ...]:
        """The box of all elements: the layers first, then each dim from 0."""
        return (self.layers, *((0, dim.size) for dim in self.dims))

    def name(self, layer: int) -> str:
        return self.template.format(layer=layer)


class Row(NamedTuple):
    """One line of a family's table."""

    key: str
    meanings: str
    """Meaning of each dim, separated by blanks."""
    when: str | None = None
    """Only in models whose config sets this flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models as a table."""

    model_type: str
    rows: tuple[Row, ...]
    """The tensors of one layer, in the order of the state dict."""
    head_dim: int | None = None
    """Size of a head where the config names none; None means hidden_size / num_attention_heads."""


@dataclass(frozen=True, kw_only=True)
class CanonicalModel:
    """A model as its Hugging Face state dict: names, shapes and the meaning of each dim.

    With tied embeddings there is no `lm_head.weight`: the head uses `model.embed_tokens.weight`.
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
    classes: tuple[TensorClass, ...]

    @cached_property
    def class_of(self) -> dict[str, TensorClass]:
        return {tensor_class.key: tensor_class for tensor_class in self.classes}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the state dict, layer by layer."""
        return {c.name(layer): c.shape for layer, c in by_layer(self.classes)}


def by_layer(classes: Sequence[TensorClass]) -> Iterator[tuple[int, TensorClass]]:
    """Every (layer, class), lower layers first, in the order of the classes within a layer."""
    pairs = [(layer, i) for i, c in enumerate(classes) for layer in range(*c.layers)]
    for layer, index in sorted(pairs):
        yield layer, classes[index]


def build_model(family: Family, config: Mapping[str, Any]) -> CanonicalModel:
    """Fill a family's table with the sizes of one config.

    Raises:
        ModelError: sizes are missing or not positive whole numbers, or do not divide as they must;
            a flag is neither true nor false.
    """
    fields = Fields(config)
    sizes = _read_sizes(family, fields)
    num_layers = sizes["num_hidden_layers"]
    num_heads = sizes["num_attention_heads"]
    num_kv_heads = sizes["num_key_value_heads"]
    head_dim = sizes["head_dim"]
    size_of = {
        "vocab": sizes["vocab_size"],
        "hidden": sizes["hidden_size"],
        "intermediate": sizes["intermediate_size"],
        "q": num_heads * head_dim,
        "kv": num_kv_heads * head_dim,
        "head_dim": head_dim,
    }
    tied = fields.flag("tie_word_embeddings")

    def make(row: Row, template: str, layers: tuple[int, int]) -> TensorClass:
        dims = tuple(Dim(meaning, size_of[meaning]) for meaning in row.meanings.split())
        return TensorClass(key=row.key, template=template, layers=layers, dims=dims)

    def top(key: str, meanings: str, layer: int) -> TensorClass:
        return make(Row(key, meanings), key, (layer, layer + 1))

    classes = [top("model.embed_tokens.weight", "vocab hidden", -1)]
    classes += [
        make(row, LAYER_PREFIX + row.key, (0, num_layers))
        for row in family.rows
        if row.when is None or fields.flag(row.when)
    ]
    classes.append(top("model.norm.weight", "hidden", num_layers))
    if not tied:
        classes.append(top("lm_head.weight", "vocab hidden", num_layers))
    return CanonicalModel(
        name=family.model_type,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        tied=tied,
        classes=tuple(classes),
    )


def _read_sizes(family: Family, config: Fields) -> dict[str, int]:
    sizes = {key: config.whole(key) for key in REQUIRED}
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_attention_heads"]
    num_kv_heads = (
        config.whole("num_key_value_heads") if config.has("num_key_value_heads") else num_heads
    )
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads={num_kv_heads} does not divide "
            f"num_attention_heads={num_heads}; each kv head must serve the same number of q heads"
        )
    head_dim = config.whole("head_dim") if config.has("head_dim") else family.head_dim
    if head_dim is None and hidden_size % num_heads:
        raise ModelError(
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size} and the "
            "config has no head_dim; set head_dim"
        )
    return sizes | {
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads if head_dim is None else head_dim,
    }


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
