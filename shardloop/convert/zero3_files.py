"""DeepSpeed's ZeRO-3 checkpoints: two files for each rank, all weights flat. Floor 3.

Called by `convert.formats`. As `deepspeed/utils/zero_to_fp32.py` reads them back:

    ROOT/latest                                     the name of the newest folder
    ROOT/global_step100/
      zero_pp_rank_R_mp_rank_00_model_states.pt     param_shapes: for each group, shape by name;
                                                    buffers, whole; frozen weights, in fragments
      [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
                                                    fp32_flat_groups: flat float32 tensors

Rank R of W has elements R * n up to (R + 1) * n of each flattened tensor, n = ceil(size / W), the
tensors one after the other in the order of param_shapes over all its flat groups; what the last
ranks lack of n is padding. That is the layout `zero3=W`.
"""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardloop.convert.damage import damaged
from shardloop.convert.store import Stored, UnchunkedReader
from shardloop.convert.torch_files import load_torch_file, plain
from shardloop.errors import CheckpointError
from shardloop.layout.layout import Box

TRACKER = "latest"
MODEL_STATES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
OPTIM_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class Flat(NamedTuple):
    """A rank's part of a flattened tensor: elements of tensors one after the other."""

    parts: tuple[Tensor, ...]
    size: int
    file: Path

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype if self.parts else torch.float32


class Zero3Reader(UnchunkedReader):
    format = "zero3"

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: files of ranks are missing, cannot be read or do not belong together;
                it is of another stage than 3, or tensor-parallel.
        """
        self.path = path
        model, optim = (_files(path, pattern) for pattern in (MODEL_STATES, OPTIM_STATES))
        first = load_torch_file(optim[min(optim)])
        self.num_ranks = _world_size(path, first)
        faults = [
            f"no {kind} of rank {rank}"
            for kind, files in (("model_states.pt", model), ("optim_states.pt", optim))
            for rank in range(self.num_ranks)
            if rank not in files
        ]
        faults += [f"a file of rank {r}" for r in {**model, **optim} if r >= self.num_ranks]
        if faults:
            raise CheckpointError(
                f"{path}: it was saved by {self.num_ranks} ranks; " + "; ".join(faults)
            )
        self.spec = f"zero3={self.num_ranks}"
        self._ranks = [
            _rank_tensors(rank, self.num_ranks, model[rank], optim[rank])
            for rank in range(self.num_ranks)
        ]
        states = load_torch_file(model[0])
        self.notes: Mapping[str, str] = {
            key: str(plain(states[key]))
            for key in ("ds_version", "global_steps")
            if states.get(key) is not None
        }

    def tensors(self, rank: int) -> dict[str, Stored]:
        return {
            name: Stored((flat.size,), flat.dtype, (flat.file,))
            for name, flat in self._ranks[rank].items()
        }

    def read(self, rank: int, name: str, box: Box) -> Tensor:
        ((lo, hi),) = box
        flat = self._ranks[rank][name]
        parts = list(_slices(flat.parts, lo, hi))
        return parts[0] if len(parts) == 1 else torch.cat([flat.parts[0][:0], *parts])


def _slices(tensors: tuple[Tensor, ...] | list[Tensor], lo: int, hi: int) -> Iterator[Tensor]:
    """Elements lo:hi of flat tensors one after the other, as views."""
    start = 0
    for tensor in tensors:
        first, last = max(lo - start, 0), min(hi - start, len(tensor))
        if first < last:
            yield tensor[first:last]
        start += len(tensor)


def _files(path: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = [(match, entry) for entry in path.iterdir() if (match := pattern.fullmatch(entry.name))]
    if any(int(match[2]) for match, _ in found):
        raise CheckpointError(
            f"{path}: has files of mp_rank_01 and above; only checkpoints without tensor "
            "parallelism (mp_rank_00) are read"
        )
    if not found:
        raise CheckpointError(f"{path}: no file {pattern.pattern}; copy all files of all ranks")
    return {int(match[1]): entry for match, entry in found}


def _optimizer(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    state = content.get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file}: has no optimizer_state_dict; is it a file of DeepSpeed?")
    return state


def _world_size(path: Path, content: Mapping[str, Any]) -> int:
    state = _optimizer(path, content)
    stage, count = plain(state.get("zero_stage")), state.get("partition_count")
    if stage != 3 or "fp32_flat_groups" not in state:
        raise CheckpointError(f"{path}: is of ZeRO stage {stage}; only stage 3 is read")
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(f"{path}: partition_count={count}; it must be a number of ranks")
    return count


def _rank_tensors(rank: int, world_size: int, model: Path, optim: Path) -> dict[str, Flat]:
    states, state = load_torch_file(model), _optimizer(optim, load_torch_file(optim))
    try:
        return {
            **_trained(rank, world_size, states, state, optim),
            **_untrained(rank, world_size, states, model),
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise damaged(model, error) from error


def _trained(
    rank: int,
    world_size: int,
    states: Mapping[str, Any],
    state: Mapping[str, Any],
    optim: Path,
) -> dict[str, Flat]:
    groups = [group.reshape(-1) for group in state["fp32_flat_groups"]]
    shapes: dict[str, Any] = {}
    for group in states.get("param_shapes", []):
        shapes |= group
    found: dict[str, Flat] = {}
    at = 0
    for name, shape in shapes.items():
        chunk = -(-prod(shape) // world_size)
        mine = _mine(prod(shape), rank, world_size)
        found[name] = Flat(tuple(_slices(groups, at, at + mine)), mine, optim)
        at += chunk
    have = sum(len(group) for group in groups)
    if at > have:
        raise CheckpointError(
            f"{optim}: its flat groups have {have} elements, its param_shapes asks for {at}; the "
            "files do not belong together"
        )
    return found


def _untrained(
    rank: int, world_size: int, states: Mapping[str, Any], model: Path
) -> dict[str, Flat]:
    """Frozen weights, of which each rank has its fragment, and buffers, which all have whole."""
    found: dict[str, Flat] = {}
    for name, shape in (states.get("frozen_param_shapes") or {}).items():
        fragment = states["frozen_param_fragments"][name].reshape(-1)
        mine = _mine(prod(shape), rank, world_size)
        found[name] = Flat((fragment[:mine],), mine, model)
    for name in states.get("buffer_names", ()):
        buffer = states["module"][name].reshape(-1)
        mine = _mine(len(buffer), rank, world_size)
        start = rank * -(-len(buffer) // world_size)
        found[name] = Flat((buffer[start : start + mine],), mine, model)
    return found


def _mine(size: int, rank: int, world_size: int) -> int:
    """Elements of a flattened tensor that a rank has, without padding."""
    chunk = -(-size // world_size)
    return max(0, min(chunk, size - rank * chunk))
