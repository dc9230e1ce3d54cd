"""Random models of any size as Hugging Face folders, for benchmarks.

A word is a token: the text "t7 t12" is the ids 7 and 12, so that programs that want text and those
that want ids get the same prompts.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from shardloop.families import canonical_model
from shardloop.hf import save_hf_folder

PAD, BOS, EOS = 0, 1, 2
NUM_SPECIAL = 3
EMBEDDING_STD = 0.1
BIAS_STDS = 4.0
"""The constant part of the residual stream, as a multiple of the norm of the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """By default 3.7 M parameters in the layers and 8.2 M in the tied embedding."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 768
    vocab: int = 32_000
    context: int = 1024

    @property
    def layer_weights(self) -> list[tuple[int, int]]:
        """(in, out) of every product of one layer."""
        attention = self.heads * self.head_dim
        return [
            (self.width, attention + 2 * self.kv_heads * self.head_dim),
            (attention, self.width),
            (self.width, 2 * self.ffn),
            (self.ffn, self.width),
        ]

    @property
    def num_layer_parameters(self) -> int:
        return self.layers * sum(i * o for i, o in self.layer_weights)

    @property
    def num_head_parameters(self) -> int:
        return self.vocab * self.width

    def gemm_shapes(self, num_tokens: int, *, num_scored: int) -> list[tuple[int, int, int]]:
        """(m, k, n) of the products that take tokens through the layers and some to logits."""
        layers = [(num_tokens, i, o) for i, o in self.layer_weights] * self.layers
        return [*layers, (num_scored, self.width, self.vocab)]

    def flops(self, *, num_tokens: int, num_scored: int) -> float:
        """Of a forward pass, attention scores left out."""
        return 2.0 * (
            num_tokens * self.num_layer_parameters + num_scored * self.num_head_parameters
        )

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }


def write_model(
    folder: Path, size: ModelSize, *, seed: int = 0, mean_length: float | None = None
) -> Path:
    """Writes a random model and its tokenizer; returns `folder`.

    With `mean_length`, the end-of-sequence token has a probability of about 1 / mean_length at
    every position, by the weights alone: whoever samples from the model gets geometric lengths of
    that mean. The first element of the residual stream is the same large number for every token and
    no layer writes to it; the end token's row of the tied head is larger there than all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    config = size.hf_config()
    shapes = canonical_model(config).tensor_shapes()
    std = 0.02 if mean_length is None else 0.01
    tensors = {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * std
        for name, shape in sorted(shapes.items())
    }
    if mean_length is not None:
        _bias_end(tensors, size, mean_length=mean_length)
    write_word_tokenizer(folder, num_ids=size.vocab, context=size.context)
    save_hf_folder(folder, config=config, tensors=tensors, tokenizer_from=None)
    return folder


def _bias_end(tensors: dict[str, torch.Tensor], size: ModelSize, *, mean_length: float) -> None:
    embedding_VD = tensors["model.embed_tokens.weight"]
    embedding_VD *= EMBEDDING_STD / embedding_VD.std()
    root = math.sqrt(size.width)
    constant = BIAS_STDS * root * EMBEDDING_STD
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    # After the last norm: the constant element's share, the spread of logits that the others cause,
    # and the logit of the token that has just been read, whose own embedding is among them.
    share = BIAS_STDS**2 / (1 + BIAS_STDS**2)
    spread = root * math.sqrt(1 - share) * EMBEDDING_STD
    own = root * spread
    log_others = math.log(size.vocab * math.exp(spread**2 / 2) + math.exp(own))
    wanted = log_others - math.log(mean_length - 1)
    embedding_VD[:, 0] = constant
    embedding_VD[EOS, 1:] = 0.0
    embedding_VD[EOS, 0] += wanted / (root * math.sqrt(share))


def write_word_tokenizer(folder: Path, *, num_ids: int, context: int) -> None:
    specials = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: i for i, token in enumerate(specials)}
    vocab |= {f"t{i}": i for i in range(NUM_SPECIAL, num_ids)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def as_text(token_ids: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in token_ids)
