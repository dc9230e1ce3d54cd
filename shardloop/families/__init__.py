"""Families of models, one table each, and `canonical_model`, which fills a table from a config.

Called by everything that needs a model's tensor names and shapes. Floor 1.
"""

from collections.abc import Mapping
from typing import Any

from shardloop.errors import ModelError
from shardloop.families.base import CanonicalModel, build_model
from shardloop.families.fields import Fields
from shardloop.families.llama import LLAMA
from shardloop.families.qwen2 import QWEN2
from shardloop.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}


def canonical_model(hf_config: Mapping[str, Any]) -> CanonicalModel:
    """The tensors of a model, from the contents of its `config.json`.

    Raises:
        ModelError: the model type is not one of ours, or sizes are missing or impossible.
    """
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"model_type={model_type!r} is not a known family; choose from {', '.join(FAMILIES)}"
        )
    return build_model(family, hf_config)


__all__ = ["FAMILIES", "CanonicalModel", "Fields", "canonical_model"]
