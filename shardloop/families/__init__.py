"""Families of models, one table each, and `canonical_model`, which fills a table from a config.

Called by everything that needs a model's tensor names and shapes. Floor 1.
"""

from collections.abc import Mapping
from typing import Any

from shardloop.errors import ModelError
from shardloop.families.base import CanonicalModel
from shardloop.families.deepseek_v3 import DEEPSEEK_V3
from shardloop.families.fields import Fields
from shardloop.families.llama import LLAMA
from shardloop.families.mixtral import MIXTRAL
from shardloop.families.qwen2 import QWEN2
from shardloop.families.qwen3 import QWEN3
from shardloop.families.qwen3_moe import QWEN3_MOE
from shardloop.families.table import build_model

FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
}
"""By the `model_type` of a config.json."""


def canonical_model(hf_config: Mapping[str, Any]) -> CanonicalModel:
    """The tensors of a model, from the contents of its `config.json`: unquantised, without LoRA.

    Raises:
        ModelError: the model type is not one of ours, sizes are missing or impossible, or the
            config asks for what its family's table cannot say.
    """
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"model_type={model_type!r} is not a known family; choose from {', '.join(FAMILIES)}"
        )
    return build_model(family, hf_config)


__all__ = ["FAMILIES", "CanonicalModel", "Fields", "canonical_model"]
