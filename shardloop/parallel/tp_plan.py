"""Tensor parallelism of a transformers policy, derived from its family's table. Floor 3.

Called by `parallel.build`. What the dims of a module's weight mean says how it runs:

    vocab hidden                 embedding, and head: rows cut; partial sums are added up
    q|kv|intermediate hidden     rows cut, with the bias: makes this rank's heads or width
    hidden q|intermediate        columns cut: partial sums are added up, the bias once
    head_dim                     whole, applied to this rank's heads: its gradient is partial
    hidden                       whole, applied to the residual stream

The residual stream is whole on every rank, or with sequence parallelism cut along its tokens; a
*region* is a module that holds cut linears: its input is made whole when it enters.

    stream ──norm──▶ whole ──▶ rows cut ──▶ heads or width of this rank ──▶ columns cut ──▶ stream

Every parameter becomes a DTensor over tp, so that gradients, norms, optimizer and checkpoints know
which parts are cut and which are copies.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shardloop.families import CanonicalModel
from shardloop.families.base import TensorClass
from shardloop.head import VocabShard
from shardloop.layout.tp import CUT_BY_TP
from shardloop.parallel.mesh import check_tensor_parallel
from shardloop.parallel.tp import ProcessGroupTP
from shardloop.policy import Policy

TOKENS_DIM, HEADS_DIM = 1, 2
"""Of activations [B, T, D] and [B, T, H, E]."""
HEAD = "lm_head"


def cut_by_tensor_parallel(
    policy: Policy, model: CanonicalModel, mesh: DeviceMesh, *, sequence_parallel: bool
) -> Policy:
    """Collective over `mesh`, the tp axis: every rank keeps its part of every weight, in place.

    All ranks hold the same whole weights before. With `sequence_parallel` the tokens of a row must
    be a multiple of the ranks.

    Raises:
        LayoutError: tp does not fit the model.
    """
    check_tensor_parallel(model, mesh.size())
    stream = Shard(TOKENS_DIM) if sequence_parallel else Replicate()
    parallelize_module(policy, mesh, dict(_styles(model, stream)), src_data_rank=None)
    embedding: Any = policy.model.embed_tokens
    head: Any = policy.lm_head
    if model.tied:
        head.weight = embedding.weight
    else:
        _replace(head, "weight", mesh, Shard(0))
    num_rows = -(-model.vocab_size // mesh.size())
    policy.vocab = VocabShard(
        tp=ProcessGroupTP(mesh.get_group()),
        first_id=min(mesh.get_local_rank() * num_rows, model.vocab_size),
        vocab_size=model.vocab_size,
    )
    return policy


def _styles(model: CanonicalModel, stream: Placement) -> Iterator[tuple[str, ParallelStyle]]:
    """How each module of the model runs, by name; `*` stands for the layer number."""
    regions = set()
    for c in model.classes:
        module, _, kind = c.template.replace("{layer}", "*").rpartition(".")
        if kind == "bias" or module == HEAD:
            continue
        yield module, _style(c, stream, is_last=c.layers[0] == model.num_layers)
        if len(c.dims) == 2 and "{layer}" in c.template:
            regions.add(module.rpartition(".")[0])
    for module in sorted(regions):
        yield module, Region(stream)


def _style(c: TensorClass, stream: Placement, *, is_last: bool) -> ParallelStyle:
    meanings = [dim.meaning for dim in c.dims]
    if meanings == ["head_dim"]:
        return Norm(Shard(HEADS_DIM))
    if meanings == ["hidden"]:
        return Norm(stream, output=Replicate() if is_last else stream)
    if meanings[0] == "vocab":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if meanings[0] in CUT_BY_TP:
        return ColwiseParallel()
    assert meanings[1] in CUT_BY_TP, f"{c.key}: tensor parallelism has no rule for {meanings}"
    return RowwiseParallel(output_layouts=stream)


class Norm(ParallelStyle):
    """A module with a whole weight on activations placed as `input`: where these are cut, each
    rank's gradient of the weight is partial and is added up over the ranks."""

    def __init__(self, input: Placement, *, output: Placement | None = None) -> None:
        super().__init__()
        self._input, self._output = input, input if output is None else output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key in list(dict(part.named_parameters(recurse=False))):
                _replace(part, key, mesh, Replicate())

        def enter(part: nn.Module, args: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(args[0], mesh, (self._input,), run_check=False)

        def leave(part: nn.Module, result: DTensor, mesh: DeviceMesh) -> Any:
            return result.redistribute(placements=(self._output,)).to_local()

        return distribute_module(module, device_mesh, replicate, enter, leave)


class Region(ParallelStyle):
    """A module whose first argument, placed as `input`, is made whole once for all cut linears
    within, and whose gradient is added up over the ranks once."""

    def __init__(self, input: Placement) -> None:
        super().__init__()
        self._input = input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._enter, device_mesh), with_kwargs=True)
        return module

    def _enter(
        self,
        mesh: DeviceMesh,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The activations are the first argument, by place or by name."""
        if args:
            return (self._whole(args[0], mesh), *args[1:]), dict(kwargs)
        first, value = next(iter(kwargs.items()))
        return args, {**kwargs, first: self._whole(value, mesh)}

    def _whole(self, value: Tensor, mesh: DeviceMesh) -> DTensor:
        placed = DTensor.from_local(value, mesh, (self._input,), run_check=False)
        return placed.redistribute(placements=(Replicate(),))


def _replace(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    weight = module.get_parameter(name)
    cut = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))
