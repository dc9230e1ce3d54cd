"""The weights of a model folder: read into transformers or by name, and written. Floor 2.

Called by the trainer, by engines that load a folder, and by the built-in models.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shardloop.errors import ModelError
from shardloop.families import canonical_model
from shardloop.hf.config import load_config
from shardloop.hf.headers import weight_files
from shardloop.hf.reading import as_model_error
from shardloop.hf.shards import MAX_SHARD_BYTES, TensorSpec, write_weights
from shardloop.hf.tokenizer import copy_tokenizer


def load_model(model_dir: Path, *, dtype: torch.dtype) -> nn.Module:
    """The transformers causal LM of a folder, in eval mode, every weight from its files in `dtype`.

    Attention is sdpa. RMS norms compute in float32, or in float64 where `dtype` is float64:
    transformers rounds them to float32 always, which leaves a float64 model exact to 1e-7 only.
    RoPE angles stay float32, as transformers makes them.

    Raises:
        ModelError: as `load_config`; or files are damaged, or weights are missing, unknown or of
            other shapes.
    """
    load_config(model_dir)
    loaded: Any
    with as_model_error(f"{model_dir}: the weights cannot be read"):
        loaded = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model: nn.Module = loaded[0]
    found: dict[str, Any] = loaded[1]
    faults = [
        f"{kind.removesuffix('_keys')}: {', '.join(sorted(map(str, found[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if found[kind]
    ]
    if faults:
        raise ModelError(
            f"{model_dir}: weights and config.json do not fit each other; " + "; ".join(faults)
        )
    _widen_norms(model)
    return model.eval()


def _widen_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)


def _rms_norm(self: Any, hidden: Tensor) -> Tensor:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * scaled.to(hidden.dtype)


def load_weights(model_dir: Path) -> dict[str, Tensor]:
    """Every weight of a folder by Hugging Face name, on the CPU, in the dtype of its file.

    The names are those of the canonical model: the alias of a tied head is left out.

    Raises:
        ModelError: as `load_model`.
    """
    model = canonical_model(load_config(model_dir))
    weights: dict[str, Tensor] = {}
    for path in weight_files(model_dir):
        with as_model_error(f"{path}: the weights cannot be read"):
            weights |= load_file(path)
    # What is left is what `load_config` has seen in the headers.
    return {name: weights[name] for name in model.tensor_shapes()}


@torch.no_grad()
def sequence_logprobs(
    causal_lm: nn.Module, token_ids: Sequence[int], *, temperature: float = 1.0
) -> Tensor:
    """Natural log-prob of every token after the first of one sequence, from its full logits.

    Slow and obvious: what faster paths are compared with. Returns [T - 1] in the model's dtype.
    """
    ids_1T = torch.tensor([list(token_ids)])
    logits_TV: Tensor = causal_lm(input_ids=ids_1T, use_cache=False).logits[0, :-1]
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0]


def save_hf_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer_from: Path | None,
) -> None:
    """Write a model folder from CPU tensors by name: see `write_hf_folder`."""
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_hf_folder(
        folder,
        config=config,
        specs=specs,
        read=tensors.__getitem__,
        tokenizer_from=tokenizer_from,
    )


def write_hf_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    tokenizer_from: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder that transformers loads: config, safetensors, tokenizer files.

    The weights come last, one tensor at a time (see `hf.shards`), and under their final name only
    when complete: an interrupted export is refused by `load_config`.

    Args:
        specs: by Hugging Face name, without the alias of a tied head. The dtype of most of the
            elements is what the config says.
        read: gives each tensor once, on the CPU, in the order of `specs` where all have one dtype.
    Raises:
        OSError: the folder cannot be written. Whatever `read` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, folder)
    (folder / "config.json").write_text(_config_text(config, specs), encoding="utf-8")
    write_weights(folder, specs, read, max_shard_bytes=max_shard_bytes)


def _config_text(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str:
    num_bytes: Counter[torch.dtype] = Counter()
    for spec in specs.values():
        if spec.dtype.itemsize > 1:  # the weights of a quantised model are computed with in another
            num_bytes[spec.dtype] += spec.num_bytes
    ((dtype, _),) = num_bytes.most_common(1)
    written = {key: value for key, value in config.items() if key != "torch_dtype"}
    written["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(written, indent=2) + "\n"
