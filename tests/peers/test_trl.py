"""Our numbers against TRL's own functions; needs the extra `peers`."""

import pytest
import torch

from shardloop.head import token_logprobs

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_entropy_and_gradient_are_those_of_trl(temperature: float) -> None:
    peer = pytest.importorskip("trl.trainer.utils")
    generator = torch.Generator().manual_seed(0)
    hidden_nD = torch.randn(37, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(101, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    target_ids_n = torch.randint(0, 101, (37,), generator=generator)
    logprobs_n, entropy_n = token_logprobs(
        hidden_nD, weight_VD, target_ids_n, temperature=temperature, chunk=8
    )
    logits_nV = hidden_nD @ weight_VD.T / temperature
    theirs_n = peer.selective_log_softmax(logits_nV, target_ids_n)
    torch.testing.assert_close(logprobs_n, theirs_n, atol=1e-10, rtol=0)
    torch.testing.assert_close(entropy_n, peer.entropy_from_logits(logits_nV), atol=1e-10, rtol=0)
    upstream_n = torch.randn(37, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((logprobs_n * upstream_n).sum(), (hidden_nD, weight_VD))
    theirs = torch.autograd.grad((theirs_n * upstream_n).sum(), (hidden_nD, weight_VD))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=0)
