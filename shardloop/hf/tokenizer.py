"""The tokenizer of a model folder. Floor 2.

Called by whoever turns prompts into ids; exports copy its files.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from shardloop.errors import ModelError, TaskError
from shardloop.hf.config import read_json
from shardloop.types import Prompt

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


def load_tokenizer(model_dir: Path) -> HFTokenizer:
    """The tokenizer of a model folder; it stops at its own eos and those of generation_config.json.

    Raises:
        ModelError: the folder has no tokenizer, or one that cannot be read.
    """
    if not (model_dir / "tokenizer.json").is_file():
        raise ModelError(f"{model_dir}: no tokenizer; put a tokenizer.json beside config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model_dir}: the tokenizer cannot be read: {error}") from error
    generation = read_json(model_dir / "generation_config.json") or {}
    return HFTokenizer(tokenizer, _stop_ids(tokenizer.eos_token_id, generation.get("eos_token_id")))


def _stop_ids(*eos: int | Iterable[int] | None) -> tuple[int, ...]:
    """All ids, without repeats, in the order given."""
    ids: dict[int, None] = {}
    for entry in eos:
        if entry is not None:
            ids.update(dict.fromkeys([entry] if isinstance(entry, int) else entry))
    return tuple(ids)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies what `source` has of a tokenizer's files into the folder `target`."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
