"""Tiny random model folders and batches for the tests of the trainer and for their ranks."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

from shardloop.rl.batch import Batch

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
    path: Path, family: str = "qwen3", *, tied: bool = True, seed: int = 0, **sizes: Any
) -> Path:
    """A random model with a one-letter tokenizer: <s>, </s>, then letters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **sizes}, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than usual, so that attention and norms matter in the output.
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.3)
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


def make_random_batch(
    *, num_rows: int = 7, seed: int = 0, temperature: float = 0.7, longest: int = 12
) -> Batch:
    """Rows of uneven lengths; the mask has holes and one row without any loss token."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = integers(3, longest + 1, num_rows)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = sum(lengths)
    loss_mask_N = torch.rand(num_tokens, generator=generator) < 0.6
    loss_mask_N[offsets[:-1]] = False
    loss_mask_N[offsets[1] : offsets[2]] = False

    def values() -> torch.Tensor:
        drawn = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
        return drawn.masked_fill(~loss_mask_N, 0.0)

    return Batch(
        token_ids_N=torch.tensor(integers(0, VOCAB, num_tokens)),
        offsets=offsets,
        loss_mask_N=loss_mask_N,
        advantages_N=values(),
        behave_N=values() - 3.0,
        old_N=values() - 3.0,
        ref_N=values() - 3.0,
        weights_N=values().exp().clamp(max=2.0).masked_fill(~loss_mask_N, 0.0),
        temperature=temperature,
    )
