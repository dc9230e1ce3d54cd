"""The built-in tiny model: 0.1 M parameters that learn a toy task in seconds on a CPU. Floor 2.

Called by `shardloop.builtin` for `model=tiny`, by tests and by notebooks. A character-level Qwen3
with random weights, as an ordinary Hugging Face folder: nothing downstream knows it is a toy.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from shardloop.families import canonical_model
from shardloop.hf import save_hf_folder

SPECIALS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+-*/()=,:#> abcdefghijklmnopqrstuvwxyz\n"
INIT_STD = 0.02

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(SPECIALS) + len(CHARACTERS),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": INIT_STD,
    "pad_token_id": SPECIALS.index("<pad>"),
    "bos_token_id": SPECIALS.index("<bos>"),
    "eos_token_id": SPECIALS.index("<eos>"),
}


def build_tiny(folder: Path, *, seed: int) -> Path:
    """Writes the model with weights that `seed` alone decides, and its tokenizer; returns `folder`.

    An earlier tiny model in `folder` is replaced. torch's global generator is left alone.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_char_tokenizer(folder)
    save_hf_folder(folder, config=CONFIG, tensors=_random_weights(seed), tokenizer_from=None)
    return folder


def _random_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = canonical_model(CONFIG).tensor_shapes()
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * INIT_STD
        for name, shape in sorted(shapes.items())
    }


def write_char_tokenizer(folder: Path) -> None:
    """One token a character. Encoding any other character raises: the unknown token it would need
    is not in the vocabulary, so nothing is dropped or replaced."""
    tokenizer = Tokenizer(
        models.WordLevel(
            {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    bos = "<bos>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, SPECIALS.index(bos))]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
