"""The tokenizer of a model folder. Floor 2.

Called by whoever turns prompts into ids; exports copy its files.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from shardloop.errors import ModelError, TaskError
from shardloop.families import Fields
from shardloop.hf.config import check_num_ids
from shardloop.hf.reading import as_model_error, demand_model_folder, read_json
from shardloop.types import Prompt, shorten

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
        return self._encoded(text, is_plain=False)

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`, but the name of a special token is only its letters."""
        return self._encoded(text, is_plain=True)

    def _encoded(self, text: str, *, is_plain: bool) -> list[int]:
        try:
            return self._encode(text, is_plain=is_plain)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            reason = self._character_at_fault(text) or str(error)
            raise TaskError(
                f"text {shorten(repr(text))} cannot be encoded with this model's vocabulary: "
                f"{reason}"
            ) from error

    def _encode(self, text: str, *, is_plain: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=is_plain
        )
        return ids

    def _character_at_fault(self, text: str) -> str | None:
        for character in dict.fromkeys(text):
            try:
                self._encode(character, is_plain=True)
            except Exception:
                return f"it lacks {character!r} (U+{ord(character):04X})"
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Messages go through the chat template, opened for the assistant's answer; raw text stays
        as it is, after the beginning-of-sequence token where the tokenizer writes one.

        Raises:
            ModelError: messages, and the tokenizer has no chat template, or one that fails on them.
            TaskError: as `encode`.
        """
        if prompt.text is not None:
            return self._begin + self.encode(prompt.text)
        if self._tokenizer.chat_template is None:
            raise ModelError(
                f"{prompt.named} has messages but the tokenizer has no chat template; "
                "use a chat model or a task of raw text"
            )
        with as_model_error(f"the tokenizer's chat template fails on {prompt.named}"):
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages or ()],
                tokenize=False,
                add_generation_prompt=True,
            )
        # The template writes its special tokens itself.
        return self.encode(text)


def load_tokenizer(model_dir: Path) -> HFTokenizer:
    """The tokenizer of a model folder. It stops at its own eos and at those of
    generation_config.json and config.json, in this order.

    Raises:
        ModelError: there is no such folder, or it has no tokenizer, or one that cannot be read; it
            or a stop id exceeds the model's vocabulary.
    """
    demand_model_folder(model_dir)
    if not (model_dir / "tokenizer.json").is_file():
        raise ModelError(f"{model_dir}: no tokenizer; put a tokenizer.json beside config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        read_json(model_dir / name)
    with as_model_error(f"{model_dir}: the tokenizer cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
        made = HFTokenizer(tokenizer, stop_token_ids=())
    config = _fields(model_dir / "config.json")
    num_embeddings = config.whole("vocab_size") if config.has("vocab_size") else made.vocab_size
    check_num_ids(model_dir, made.vocab_size, num_embeddings)
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    others = [
        token_id
        for fields in (_fields(model_dir / "generation_config.json"), config)
        for token_id in fields.ids("eos_token_id", below=num_embeddings)
    ]
    made.stop_token_ids = tuple(dict.fromkeys((*own, *others)))
    return made


def _fields(path: Path) -> Fields:
    return Fields(read_json(path) or {}, str(path))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies what `source` has of a tokenizer's files into the folder `target`."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
