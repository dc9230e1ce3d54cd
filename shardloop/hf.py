"""Model folders in Hugging Face format: read, check, write. Floor 2.

Called by the trainer and by whoever needs a tokenizer. The only module that imports transformers,
so that its renames are met in one place. Nothing here reaches the network, and no code from a model
folder is run.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from shardloop.errors import ModelError, TaskError
from shardloop.families import canonical_model
from shardloop.types import Prompt

WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)

# Whatever these would say is raised here as a ModelError instead.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def load_config(model_dir: Path | str) -> dict[str, Any]:
    """Contents of `config.json`, once the folder is known to be usable.

    Raises:
        ModelError: there is no such folder, no config, an unknown model type, sliding-window
            attention, no safetensors weights, or a tokenizer with ids that the model has no
            embedding for.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ModelError(
            f"model={str(folder)!r}: no such folder; give one with config.json and *.safetensors"
        )
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder}: no config.json; give a model folder in Hugging Face format")
    try:
        num_embeddings = canonical_model(config).vocab_size
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError(
            f"{folder}: sliding-window attention is not supported; choose a model of full attention"
        )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no weights; put *.safetensors files beside config.json")
    num_ids = _num_tokenizer_ids(folder)
    if num_ids > num_embeddings:
        raise ModelError(
            f"{folder}: the tokenizer has {num_ids} ids but the model only "
            f"vocab_size={num_embeddings}; use the tokenizer that belongs to the model"
        )
    return config


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}); restore the file") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: holds {type(content).__name__}, not a JSON object; restore the file"
        )
    return content


def _num_tokenizer_ids(folder: Path) -> int:
    """One more than the greatest id in `tokenizer.json`; 0 where there is none."""
    tokenizer = _read_json(folder / "tokenizer.json")
    if tokenizer is None:
        return 0
    vocab = tokenizer.get("model", {}).get("vocab", {})
    # Unigram tokenizers list their pieces by id; the others map each piece to its id.
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    ids.update(token["id"] for token in tokenizer.get("added_tokens", ()))
    return max(ids, default=-1) + 1


def load_model(model_dir: Path | str, *, dtype: torch.dtype) -> nn.Module:
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
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{model_dir}: the weights cannot be read: {error}") from error
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


def load_weights(model_dir: Path | str) -> dict[str, Tensor]:
    """Every weight of a folder by Hugging Face name, on the CPU, in the dtype of its file.

    The names are those of the canonical model: the alias of a tied head is left out.

    Raises:
        ModelError: as `load_model`.
    """
    config = load_config(model_dir)
    shapes = canonical_model(config).tensor_shapes()
    weights: dict[str, Tensor] = {}
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        try:
            weights |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: the weights cannot be read: {error}") from error
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    faults = [f"missing: {name}" for name in shapes.keys() - weights.keys()]
    faults += [f"unexpected: {name}" for name in weights.keys() - shapes.keys()]
    faults += [
        f"mismatched: {name} is {list(weights[name].shape)}, not {list(shapes[name])}"
        for name in shapes.keys() & weights.keys()
        if tuple(weights[name].shape) != shapes[name]
    ]
    if faults:
        raise ModelError(
            f"{model_dir}: weights and config.json do not fit; {'; '.join(sorted(faults))}"
        )
    return weights


def _widen_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)


def _rms_norm(self: Any, hidden: Tensor) -> Tensor:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * scaled.to(hidden.dtype)


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


class HFTokenizer:
    """`shardloop.types.Tokenizer` over a tokenizer folder. Made by `load_tokenizer`."""

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        # Many folders name a bos token that their tokenizer never writes: it is asked, not told.
        begins = tokenizer.encode("", add_special_tokens=True)[:1]
        self._begin = begins if begins == [tokenizer.bos_token_id] else []

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no special token is added.

        Raises:
            TaskError: the text has a character that the vocabulary lacks.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise TaskError(
                f"text {text!r} cannot be encoded with this model's vocabulary: {error}"
            ) from error
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Messages go through the chat template, opened for the assistant's answer; raw text stays
        as it is, after the beginning-of-sequence token where the tokenizer writes one.

        Raises:
            ModelError: messages, and the tokenizer has no chat template.
        """
        if prompt.text is not None:
            return self._begin + self.encode(prompt.text)
        if self._tokenizer.chat_template is None:
            raise ModelError(
                f"prompt {prompt.uid!r} has messages but the tokenizer has no chat template; "
                "use a chat model or a task of raw text"
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages or ()],
            tokenize=False,
            add_generation_prompt=True,
        )
        # The template writes its special tokens itself.
        return self.encode(text)


def load_tokenizer(model_dir: Path | str) -> HFTokenizer:
    """The tokenizer of a model folder; it stops at its own eos and those of generation_config.json.

    Raises:
        ModelError: the folder has no tokenizer, or one that cannot be read.
    """
    folder = Path(model_dir)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: no tokenizer; put a tokenizer.json beside config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from error
    generation = _read_json(folder / "generation_config.json") or {}
    return HFTokenizer(tokenizer, _stop_ids(tokenizer.eos_token_id, generation.get("eos_token_id")))


def _stop_ids(*eos: int | Iterable[int] | None) -> tuple[int, ...]:
    """All ids, without repeats, in the order given."""
    ids: dict[int, None] = {}
    for entry in eos:
        if entry is not None:
            ids.update(dict.fromkeys([entry] if isinstance(entry, int) else entry))
    return tuple(ids)


def save_hf_folder(
    path: Path | str,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer_from: Path | str | None,
) -> None:
    """Write a model folder that transformers loads: config, one safetensors file, tokenizer files.

    `tensors` are CPU tensors by Hugging Face name, of one dtype, without the alias of a tied head.
    The weights come last, and under their final name only when complete: an interrupted export is
    refused by `load_config`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (Path(tokenizer_from) / name).is_file():
                shutil.copyfile(Path(tokenizer_from) / name, folder / name)
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    written = {key: value for key, value in config.items() if key != "torch_dtype"}
    written["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    unfinished = folder / f"{WEIGHTS_FILE}.part"
    try:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{unfinished}: {error}") from error
    os.replace(unfinished, folder / WEIGHTS_FILE)
