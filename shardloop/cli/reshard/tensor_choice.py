"""Which tensor is meant by a name, of the model or of either layout. Floor 5.

Called by `cli.reshard.tensor_map`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shardloop.errors import UsageError
from shardloop.families.base import TensorClass
from shardloop.reshard.plan import Plan

FIRST_CHOICE = "self_attn.q_proj.weight"
"""The class whose tensor is drawn where none is asked for: q, k and v where they are fused."""
TOO_SHORT = ("weight", "bias")
"""What no tensor is told by alone."""


@dataclass(frozen=True)
class Choice:
    """Some classes that one local tensor shows, of one layer."""

    template: str
    classes: tuple[TensorClass, ...]
    layer: int
    expert: int | None
    """None: all of them, where there are any."""

    @property
    def name(self) -> str:
        expert = "*" if self.expert is None else self.expert
        return self.template.format(layer=self.layer, expert=expert)

    @property
    def has_experts(self) -> bool:
        """Is it all experts of the layer, and not one tensor of each class?"""
        return self.expert is None


def choose(plan: Plan, wanted: str | None) -> Choice:
    """
    Args:
        wanted: a tensor's name or template, of the model (`model.layers.3.mlp.up_proj.weight`) or
            of either layout (`qkv_proj.weight`: all that is fused in it). Its first words may be
            left out; without numbers it is the first layer, and all experts. Numbers are the
            model's. None: the destination's tensor with the query heads.
    Raises:
        UsageError: no tensor is called so (the nearest names are listed), or none has this number.
    """
    if wanted is None:
        return _first_choice(plan)
    templates = _templates(plan)
    for template, keys in templates.items():
        numbers = _match(template, wanted)
        if numbers is not None:
            return _choice(plan, template, keys, numbers)
    names = {tail: template for template in reversed(templates) for tail in _tails(template)}
    near = get_close_matches(re.sub(r"\d+", "0", wanted), names, n=5, cutoff=0.3) or list(names)
    listed = list(dict.fromkeys(names[name] for name in near))[:3]
    raise UsageError(f"tensor={wanted!r} is in neither layout; the nearest are {', '.join(listed)}")


def _templates(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Every template of the model and of both layouts, and the classes under it."""
    found: dict[str, tuple[str, ...]] = {c.template: (c.key,) for c in plan.dst.model.classes}
    for layout in (plan.src, plan.dst):
        found.update({tensor.template: tensor.keys for tensor in layout.tensors})
    return found


def _first_choice(plan: Plan) -> Choice:
    tensors = plan.dst.tensors
    shown = [tensor for tensor in tensors if FIRST_CHOICE in tensor.keys]
    tensor = (shown or [t for t in tensors if "{layer}" in t.template] or tensors)[0]
    return _choice(plan, tensor.template, tensor.keys, {})


def _tails(template: str) -> list[str]:
    """The template and what is left of it without its first words."""
    words = template.split(".")
    tails = [".".join(words[first:]) for first in range(len(words))]
    return [tail for tail in tails if tail not in TOO_SHORT]


def _match(template: str, wanted: str) -> dict[str, int] | None:
    """Numbers of a name that `template` gives; None where it is no name of it."""
    for tail in _tails(template):
        pattern = re.escape(tail)
        for number in ("layer", "expert"):
            hole = re.escape("{" + number + "}")
            pattern = pattern.replace(hole, rf"(?:(?P<{number}>-?\d+)|\*|{hole})")
        found = re.fullmatch(pattern, wanted)
        if found is not None:
            return {name: int(text) for name, text in found.groupdict().items() if text is not None}
    return None


def _choice(plan: Plan, template: str, keys: Sequence[str], numbers: dict[str, int]) -> Choice:
    classes = tuple(plan.dst.model.class_of[key] for key in keys)
    first = classes[0]
    for number, (low, high) in (("layer", first.layers), ("expert", first.experts)):
        if not low <= numbers.get(number, low) < high:
            raise UsageError(
                f"{template} has no {number} {numbers[number]}; choose from {low} to {high - 1}"
            )
    expert = numbers.get("expert", 0 if first.experts == (0, 1) else None)
    return Choice(template, classes, numbers.get("layer", first.layers[0]), expert)
