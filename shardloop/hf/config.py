"""A model folder's config.json, and whether the folder is usable at all. Floor 2.

Called before a run starts and by `hf.weights`.
"""

import json
from pathlib import Path
from typing import Any

from shardloop.errors import ModelError
from shardloop.model import DecoderConfig


def load_config(model_dir: Path) -> dict[str, Any]:
    """Contents of `config.json`, once the folder is known to be usable.

    Raises:
        ModelError: there is no such folder, no config, a model that `DecoderConfig.from_hf`
            refuses, no safetensors weights, or a tokenizer with ids that the model has no embedding
            for.
    """
    if not model_dir.is_dir():
        raise ModelError(
            f"model={str(model_dir)!r}: no such folder; give one with config.json and *.safetensors"
        )
    config = read_json(model_dir / "config.json")
    if config is None:
        raise ModelError(f"{model_dir}: no config.json; give a model folder in Hugging Face format")
    try:
        num_embeddings = DecoderConfig.from_hf(config).vocab_size
    except ModelError as error:
        raise ModelError(f"{model_dir}: {error}") from error
    if not any(model_dir.glob("*.safetensors")):
        raise ModelError(f"{model_dir}: no weights; put *.safetensors files beside config.json")
    num_ids = _num_tokenizer_ids(model_dir)
    if num_ids > num_embeddings:
        raise ModelError(
            f"{model_dir}: the tokenizer has {num_ids} ids but the model only "
            f"vocab_size={num_embeddings}; use the tokenizer that belongs to the model"
        )
    return config


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file.

    Raises:
        ModelError: the file holds something else.
    """
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
    tokenizer = read_json(folder / "tokenizer.json")
    if tokenizer is None:
        return 0
    vocab = tokenizer.get("model", {}).get("vocab", {})
    # Unigram tokenizers list their pieces by id; the others map each piece to its id.
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    ids.update(token["id"] for token in tokenizer.get("added_tokens", ()))
    return max(ids, default=-1) + 1
