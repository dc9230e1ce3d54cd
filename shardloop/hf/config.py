"""A model folder's config.json, and whether the folder is usable at all. Floor 2.

Called before a run starts and by `hf.weights`.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

from shardloop.errors import ModelError
from shardloop.families import Fields, canonical_model
from shardloop.hf.headers import check_weights
from shardloop.hf.reading import as_model_error, demand_model_folder, read_json
from shardloop.model import DecoderConfig

DTYPES = ("float32", "float64", "bfloat16", "float16")


def load_config(model_dir: Path) -> dict[str, Any]:
    """Contents of `config.json`, once the folder is known to be usable.

    Raises:
        ModelError: there is no such folder, no config, a model that `DecoderConfig.from_hf` or
            transformers refuses, weights that do not fit (see `check_weights`), or a tokenizer with
            ids that the model has no embedding for.
    """
    demand_model_folder(model_dir)
    config = read_json(model_dir / "config.json")
    if config is None:
        raise ModelError(f"{model_dir}: no config.json; give a model folder in Hugging Face format")
    try:
        num_embeddings = DecoderConfig.from_hf(config).vocab_size
        _check_what_transformers_uses(Fields(config), num_embeddings)
    except ModelError as error:
        raise ModelError(f"{model_dir}: {error}") from error
    with as_model_error(f"{model_dir}/config.json: transformers refuses it"):
        AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    check_weights(model_dir, canonical_model(config))
    if (model_dir / "tokenizer.json").is_file():
        check_num_ids(model_dir, num_tokenizer_ids(model_dir), num_embeddings)
    return config


def _check_what_transformers_uses(config: Fields, num_embeddings: int) -> None:
    for key in ("dtype", "torch_dtype"):
        if config.has(key):
            config.choice(key, DTYPES, default="float32")
    config.ids("eos_token_id", below=num_embeddings)
    if config.has("pad_token_id"):
        # Some folders write -1 for none.
        config.whole("pad_token_id", least=-1, most=num_embeddings - 1)


def num_tokenizer_ids(model_dir: Path) -> int:
    """One more than the greatest id in `tokenizer.json`.

    Raises:
        ModelError: it is no tokenizer.
    """
    path = model_dir / "tokenizer.json"
    with as_model_error(f"{path}: the tokenizer cannot be read"):
        vocab = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return max(vocab.values(), default=-1) + 1


def check_num_ids(model_dir: Path, num_ids: int, num_embeddings: int) -> None:
    """
    Raises:
        ModelError: the tokenizer has ids without an embedding.
    """
    if num_ids > num_embeddings:
        raise ModelError(
            f"{model_dir}: the tokenizer has {num_ids} ids but the model only "
            f"vocab_size={num_embeddings}; use the tokenizer that belongs to the model"
        )
