"""Model folders in Hugging Face format: read, check, write. Floor 2.

The only package that imports transformers, so that its renames are met in one place. Nothing here
reaches the network, and no code from a model folder is run.

    reading     JSON, and other libraries' errors as ours
    config      config.json, and whether the folder is usable
    headers     which tensors the weight files hold
    shards      safetensors written one tensor at a time
    weights     transformers models, tensors by name, exports
    tokenizer   text and prompts to ids and back
"""

from transformers.utils import logging as transformers_logging

from shardloop.hf.config import load_config
from shardloop.hf.headers import WEIGHTS_FILE
from shardloop.hf.shards import TensorSpec
from shardloop.hf.tokenizer import HFTokenizer, load_tokenizer
from shardloop.hf.weights import (
    load_model,
    load_weights,
    save_hf_folder,
    sequence_logprobs,
    write_hf_folder,
)

# Whatever these would say is raised as a ModelError instead.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

__all__ = [
    "WEIGHTS_FILE",
    "HFTokenizer",
    "TensorSpec",
    "load_config",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "save_hf_folder",
    "sequence_logprobs",
    "write_hf_folder",
]
