"""The weights of a model folder: read into transformers or by name, and written. Floor 2.

Called by the trainer, by engines that load a folder, and by the built-in models.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shardloop.errors import ModelError
from shardloop.families import canonical_model
from shardloop.hf.config import load_config
from shardloop.hf.headers import WEIGHTS_FILE, weight_files
from shardloop.hf.reading import as_model_error
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
    """Write a model folder that transformers loads: config, one safetensors file, tokenizer files.

    `tensors` are CPU tensors by Hugging Face name, of one dtype, without the alias of a tied head.
    The weights come last, and under their final name only when complete: an interrupted export is
    refused by `load_config`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, folder)
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    written = {key: value for key, value in config.items() if key != "torch_dtype"}
    written["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    unfinished = folder / f"{WEIGHTS_FILE}.part"
    try:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{unfinished}: {error}") from error
    # safetensors makes its files readable by their owner alone, whatever the umask.
    unfinished.chmod((folder / "config.json").stat().st_mode & 0o777)
    os.replace(unfinished, folder / WEIGHTS_FILE)
