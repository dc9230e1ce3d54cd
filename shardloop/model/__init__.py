"""Our own decoder for Llama, Qwen2 and Qwen3, in the fused layout an engine serves from. Floor 2.

Independent of transformers on purpose: two implementations that agree to 1e-12 check each other.

    config           what config.json says, or a ModelError naming what is not supported
    rope             rotary position tables
    tensor_parallel  the two collectives a decoder needs, and their single-process form
    decoder          the module: ids -> hidden -> logits, attention history supplied by the caller
"""

from shardloop.model.config import DecoderConfig
from shardloop.model.decoder import Decoder, PromptAttention
from shardloop.model.tensor_parallel import SingleProcess, TensorParallel

__all__ = ["Decoder", "DecoderConfig", "PromptAttention", "SingleProcess", "TensorParallel"]
