"""A family of models as a table, and `build_model`, which fills a table from a config. Floor 1.

Called by `shardloop.families.canonical_model`; each family's own module holds its table.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shardloop.errors import ModelError
from shardloop.families.base import LAYER_PREFIX, CanonicalModel, Dim, TensorClass
from shardloop.families.fields import Fields


class Row(NamedTuple):
    """One line of a family's table: a tensor of each layer, or one of each expert."""

    key: str
    """Name within the layer; with `{expert}` in it each expert has such a tensor."""
    meanings: str
    """Meaning of each dim, separated by blanks."""
    when: str | None = None
    """Only in models whose config sets this flag or gives this size; after `no `: does not."""
    layers: Literal["all", "dense", "moe"] = "all"
    dtype: str | None = None
    """Where the tensor is kept in another dtype than the model."""


class Size(NamedTuple):
    """How many elements a meaning has, in terms of fields of the config."""

    fields: str
    """Names joined by ` + `."""
    heads: str | None = None
    """Name of the number of heads that each have so many, and that no layout may cut."""
    times: str | None = None
    """Name of a factor that layouts need not respect."""

    def names(self) -> set[str]:
        return {*self.fields.split(" + "), *filter(None, (self.heads, self.times))}

    def read(self, config: Fields) -> tuple[int, int]:
        """Elements, and the parts of them that no layout may cut."""
        each = sum(config.whole(name) for name in self.fields.split(" + "))
        if self.heads is not None:
            num_heads = config.whole(self.heads)
            return each * num_heads, num_heads
        size = each * (1 if self.times is None else config.whole(self.times))
        return size, size


SIZES = {
    "vocab": Size("vocab_size"),
    "hidden": Size("hidden_size"),
    "intermediate": Size("intermediate_size"),
    "expert_intermediate": Size("moe_intermediate_size"),
    "experts": Size("num_experts"),
    "q": Size("head_dim", heads="num_attention_heads"),
    "kv": Size("head_dim", heads="num_key_value_heads"),
    "head_dim": Size("head_dim"),
}
"""What a meaning measures, where a family does not say otherwise."""

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

CAN_BE_NULL = ("q_lora_rank",)
"""Sizes whose null means that the model goes without; as `when` of a row they are no flags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models as a table."""

    model_type: str
    rows: tuple[Row, ...]
    """The tensors of one layer, in the order of the state dict."""
    head_dim: int | None = None
    """Size of a head where the config names none; None means hidden_size / num_attention_heads."""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Meanings that are not those of `SIZES`."""
    num_dense: str | None = None
    """Field that says how many of the first layers are dense; None: all layers are alike."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields with the values that the table can say, wherever the config has them."""


def build_model(family: Family, config: Mapping[str, Any]) -> CanonicalModel:
    """Fill a family's table with the sizes of one config.

    Raises:
        ModelError: sizes are missing or not positive whole numbers, or do not divide as they must;
            a flag is neither true nor false; the config asks for what the table cannot say.
    """
    fields = _checked(family, config)
    lines = list(_lines(family, fields))
    measured = _measure(family, (row.meanings for _, _, row in lines), fields)
    sizes = {meaning: size for meaning, (size, _) in measured.items()}
    units = {meaning: parts for meaning, (_, parts) in measured.items()}
    num_heads = fields.whole("num_attention_heads")
    return CanonicalModel(
        name=family.model_type,
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=units.get("kv", num_heads),
        head_dim=sizes["q"] // num_heads,
        hidden_size=sizes["hidden"],
        intermediate_size=fields.whole("intermediate_size"),
        vocab_size=sizes["vocab"],
        tied=_is_tied(fields),
        sizes=sizes,
        units=units,
        classes=tuple(
            TensorClass(
                key=row.key,
                template=prefix + row.key,
                layers=layers,
                experts=(0, sizes["experts"]) if "{expert}" in row.key else (0, 1),
                dims=tuple(Dim(meaning, sizes[meaning]) for meaning in row.meanings.split()),
                dtype=row.dtype,
            )
            for prefix, layers, row in lines
        ),
    )


def _lines(family: Family, fields: Fields) -> Iterator[tuple[str, tuple[int, int], Row]]:
    """What comes before each name, the layers that have it, and its row: top to bottom."""
    end = fields.whole("num_hidden_layers")
    given = 0 if family.num_dense is None else fields.whole(family.num_dense, least=0)
    num_dense = min(given, end)
    runs = {"all": (0, end), "dense": (0, num_dense), "moe": (num_dense, end)}
    yield "", (-1, 0), Row("model.embed_tokens.weight", "vocab hidden")
    for row in family.rows:
        lo, hi = runs[row.layers]
        if _is_there(row, fields) and lo < hi:
            yield LAYER_PREFIX, (lo, hi), row
    yield "", (end, end + 1), Row("model.norm.weight", "hidden")
    if not _is_tied(fields):
        yield "", (end, end + 1), Row("lm_head.weight", "vocab hidden")


def _is_tied(fields: Fields) -> bool:
    return fields.flag("tie_word_embeddings")


def _checked(family: Family, config: Mapping[str, Any]) -> Fields:
    fields = Fields(config)
    for key, allowed in family.only.items():
        if key in config and config[key] not in allowed:
            choices = " or ".join(json.dumps(value) for value in allowed)
            fields.refuse(key, f"is not supported; choose {choices}")
    for key in REQUIRED:
        fields.whole(key)
    return fields


def _is_there(row: Row, fields: Fields) -> bool:
    if row.when is None:
        return True
    name = row.when.removeprefix("no ")
    is_given = fields.given(name) if name in CAN_BE_NULL else fields.flag(name)
    return is_given == (name == row.when)


def _measure(family: Family, meanings: Iterable[str], fields: Fields) -> dict[str, tuple[int, int]]:
    """Elements and units of each meaning that occurs."""
    table = {**SIZES, **family.sizes}
    used = {meaning: table[meaning] for line in meanings for meaning in line.split()}
    wanted = set().union(*(size.names() for size in used.values()))
    filled = _with_defaults(family, fields, wanted)
    return {meaning: size.read(filled) for meaning, size in used.items()}


def _with_defaults(family: Family, fields: Fields, wanted: set[str]) -> Fields:
    """The config with what may be left out of it, as far as it is wanted."""
    filled: dict[str, Any] = {}
    hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if "num_key_value_heads" in wanted:
        given = fields.has("num_key_value_heads")
        num_kv_heads = fields.whole("num_key_value_heads") if given else num_heads
        if num_heads % num_kv_heads:
            raise ModelError(
                f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads="
                f"{num_heads}; each kv head must serve the same number of q heads"
            )
        filled["num_key_value_heads"] = num_kv_heads
    if "head_dim" in wanted and not fields.has("head_dim"):
        if family.head_dim is None and hidden_size % num_heads:
            raise ModelError(
                f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size} and "
                "the config has no head_dim; set head_dim"
            )
        filled["head_dim"] = family.head_dim or hidden_size // num_heads
    if not fields.has("num_experts") and fields.has("num_local_experts"):
        filled["num_experts"] = fields.whole("num_local_experts")
    return Fields({**fields.values, **filled}, fields.where)
