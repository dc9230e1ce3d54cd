"""Tiny random model folders, for the tests of every room and for their ranks."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 33
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}</s>{% endif %}"
)


def make_folder(
    path: Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    seed: int = 0,
    std: float = 0.3,
    **sizes: Any,
) -> Path:
    """A random model with a one-letter tokenizer: <s>, </s>, then letters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **sizes}, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than usual, so that attention and norms matter in the output.
            parameter.normal_(mean=float(parameter.ndim == 1), std=std)
    model.save_pretrained(path)
    save_tokenizer(path, num_letters=26)
    return path


def save_tokenizer(path: Path, *, num_letters: int, writes_bos: bool = True) -> None:
    letters = [chr(ord("a") + i) for i in range(num_letters)]
    vocab = {piece: i for i, piece in enumerate(["<s>", "</s>", "?", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if writes_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "?",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
