"""LoRA factors as further classes of a model. Called by whoever plans layouts of adapters. Floor 1.

A layer's weight W [out, in] gets lora_A [rank, in] and lora_B [out, rank]. Their dims mean what W's
do and the rank is cut by nothing, so a layout of W is one of its factors: where W is cut along out,
B is cut and A is whole; where it is cut along in, A is cut and B is whole.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardloop.errors import ModelError
from shardloop.families.base import CanonicalModel, Dim, TensorClass

MOST_RANK = 2**16
"""Of factors: more than any layer is wide."""


def with_lora(model: CanonicalModel, *, rank: int, targets: Sequence[str]) -> CanonicalModel:
    """The model and the factors of its linear layers named in `targets`.

    Args:
        targets: Last names of modules, such as `q_proj`; as in PEFT, every layer and expert that
            has one is adapted. The factors have the names PEFT gives them in adapter files, less
            their prefix `base_model.model.`.
    Raises:
        ModelError: `rank` is not from 1 to `MOST_RANK`, there are no targets, the model has no such
            linear layer, or it has factors already.
    """
    factors = lora_adapter(model, rank=rank, targets=targets)
    return replace(factors, classes=(*model.classes, *factors.classes))


def lora_adapter(model: CanonicalModel, *, rank: int, targets: Sequence[str]) -> CanonicalModel:
    """As `with_lora`, but the factors alone: what is sent where the base weights stay."""
    allowed = list(dict.fromkeys(_module(c) for c in model.classes if c.is_linear))
    faults = [
        f"target {target!r} is no linear layer of model {model.name}; choose from "
        f"{', '.join(allowed)}"
        for target in targets
        if target not in allowed
    ]
    if not 1 <= rank <= MOST_RANK:
        faults.append(f"rank={rank}; choose a rank from 1 to {MOST_RANK}")
    if not targets:
        faults.append(f"no targets; choose some of {', '.join(allowed)}")
    if "lora_rank" in model.sizes:
        faults.append(f"model {model.name} has LoRA factors already; give the model without them")
    if faults:
        raise ModelError("; ".join(faults))
    adapted = [c for c in model.classes if c.is_linear and _module(c) in targets]
    return replace(
        model,
        sizes={**model.sizes, "lora_rank": rank},
        units={**model.units, "lora_rank": rank},
        classes=tuple(factor for c in adapted for factor in _factors(c, rank)),
    )


def _module(tensor_class: TensorClass) -> str:
    return tensor_class.key.split(".")[-2]


def _factors(weight: TensorClass, rank: int) -> tuple[TensorClass, TensorClass]:
    rows, columns = weight.dims
    r = Dim("lora_rank", rank)
    return _factor(weight, "lora_A", (r, columns)), _factor(weight, "lora_B", (rows, r))


def _factor(weight: TensorClass, name: str, dims: tuple[Dim, ...]) -> TensorClass:
    def renamed(text: str) -> str:
        return f"{text.removesuffix('weight')}{name}.weight"

    key, template = renamed(weight.key), renamed(weight.template)
    return replace(weight, key=key, template=template, dims=dims, dtype=None)
