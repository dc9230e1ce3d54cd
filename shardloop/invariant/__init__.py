"""Kernels whose value for a token does not depend on its batch; trainer and engine share them.

With them both sides run one program, and their log-probs of a token are equal bit for bit, whatever
lies beside it: other rows, packing, padding, slots, prompt or decoding step. Floor 2.

    rows        products, norms and log-softmax, each row on its own
    attention   one sequence's queries over its own keys, in blocks from its own first key
    layer       a decoder layer of these
    decoder     the engine's side: the layer over fused weights and a slot cache
    policy      the trainer's side: the layer over Hugging Face modules and packed rows
    check       proof by trial that this machine's library keeps the promise, or a refusal

How: additions that could be ordered in more than one way are either written out as single additions
in a fixed order (`rows.row_sum`) or done by a library call whose shape never changes. Reductions
over ranks have an order of their own, so tensor parallelism is refused. Gradients are those of the
plain operations, to rounding.
"""

from shardloop.invariant.check import Kernels, check_invariance
from shardloop.invariant.decoder import InvariantDecoder
from shardloop.invariant.policy import InvariantPolicy
from shardloop.invariant.rows import exact_logprobs

__all__ = [
    "InvariantDecoder",
    "InvariantPolicy",
    "Kernels",
    "check_invariance",
    "exact_logprobs",
]
