"""Layers whose activations are computed again in backward. Called by `parallel.build`. Floor 3."""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(layers: Iterable[nn.Module]) -> None:
    """Keeps only the inputs of each layer's forward, in place; names and values stay the same.

    Applied to the bare `forward`, below the hooks that other wrappings put on the module call, so
    that whatever gathers the layer's weights does so once for the second forward and the backward.
    Layers draw no random numbers: no generator state is kept.
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
