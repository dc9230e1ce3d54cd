"""Which way a plan is carried out, by name. Called by `shardloop.weight_sync`. Floor 3."""

from typing import get_args

import torch
import torch.distributed as dist

from shardloop.config import TransportName
from shardloop.errors import PlanError
from shardloop.reshard.verify import Proof
from shardloop.transport.base import Transport
from shardloop.transport.delta import DeltaTransport
from shardloop.transport.gather import Gather
from shardloop.transport.p2p import P2P
from shardloop.transport.relay import Relay
from shardloop.transport.shm import Shm


def check_transport(proof: Proof | Relay, name: str) -> None:
    """
    Raises:
        PlanError: there is no transport of this name, or it goes with the other kind of proof.
    """
    if name not in get_args(TransportName):
        allowed = ", ".join(get_args(TransportName))
        raise PlanError(f"transport={name!r} is unknown; choose from {allowed}")
    if isinstance(proof, Relay) != (name == "relay"):
        given = "a relay" if isinstance(proof, Relay) else "the proof of one plan"
        raise PlanError(
            f"transport={name!r} was given {given}; pass a relay with 'relay' and the proof of "
            "one plan with any other"
        )


def make_transport(
    proof: Proof | Relay,
    name: TransportName,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    bucket_bytes: int,
    timeout_s: float,
) -> Transport:
    """The transport of this rank; `check_transport` has passed. Collective over `group` for shm."""
    if isinstance(proof, Relay):
        rank = dist.get_rank()
        return P2P(
            proof.proof_of(rank),
            dtype=dtype,
            group=group,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            hop=proof.hop(rank),
        )
    if name == "gather":
        return Gather(proof, dtype=dtype, group=group, timeout_s=timeout_s)
    kind = {"p2p": P2P, "shm": Shm, "delta": DeltaTransport}[name]
    return kind(proof, dtype=dtype, group=group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
