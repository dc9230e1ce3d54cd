"""Megatron-Core's checkpoints with a file for each (tp, pp, ep) rank. Called by `convert.formats`.

Floor 3. As `megatron/training/checkpointing.py` names them (`get_checkpoint_name`):

    ROOT/latest_checkpointed_iteration.txt      the number, or "release"
    ROOT/iter_0000100/mp_rank_TT/model_optim_rng.pt              tensor-parallel rank TT
    ROOT/iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt          with several stages PPP
    ROOT/iter_0000100/mp_rank_TT[_PPP]_EEE/model_optim_rng.pt    with several expert ranks EEE

each with the rank's own tensors under "model". Copies along dp have no files. `_extra_state`
entries (of FP8 recipes) hold no weights and are passed over.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardloop.convert.damage import as_disk_error
from shardloop.convert.store import Stored, UnchunkedReader
from shardloop.convert.torch_files import Inert, load_torch_file
from shardloop.errors import CheckpointError, LayoutError
from shardloop.hf.shards import TensorSpec
from shardloop.layout.grid import expert_tp, make_grids
from shardloop.layout.layout import Box, box_of
from shardloop.layout.parse import LayoutSpec, parse_layout

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"
NO_WEIGHTS = "_extra_state"
CHECKPOINT_VERSION = 3.0
"""Of files whose linear_qkv is group after group."""
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


class MegatronReader(UnchunkedReader):
    format = "megatron"

    def __init__(self, path: Path, spec: str | None) -> None:
        """
        Args:
            path: the folder that has the folders of ranks.
            spec: layout of the ranks; None: as the folders' names and the settings in them say.
        Raises:
            CheckpointError: files of ranks are missing or there are more than the layout has,
                or a file cannot be read or holds something else. LayoutError: `spec`.
        """
        self.path = path
        self.spec = spec or _told_spec(path)
        names = rank_folders(parse_layout(self.spec))
        self.num_ranks = len(names)
        _check_folders(path, self.spec, names)
        content = [load_torch_file(path / name / FILE) for name in names]
        self._files = [path / name / FILE for name in names]
        self._ranks = [_weights(f, data) for f, data in zip(self._files, content, strict=True)]
        self.notes: Mapping[str, str] = {
            key: str(content[0][key])
            for key in ("iteration", "checkpoint_version")
            if isinstance(content[0].get(key), (int, float))
        }

    def tensors(self, rank: int) -> dict[str, Stored]:
        file = self._files[rank]
        return {
            name: Stored(tuple(tensor.shape), tensor.dtype, (file,))
            for name, tensor in self._ranks[rank].items()
        }

    def read(self, rank: int, name: str, box: Box) -> Tensor:
        part: Tensor = box_of(self._ranks[rank][name], box)
        return part


def rank_folders(spec: LayoutSpec) -> list[str]:
    """The folder of each rank of a Megatron layout.

    Raises:
        LayoutError: the layout has what these names cannot say.
    """
    faults = [f"{axis}={spec.size(axis)}" for axis in ("dp", "vpp") if spec.size(axis) > 1]
    if spec.names("etp") and expert_tp(spec) != spec.size("tp"):
        faults.append(f"etp={spec.size('etp')} with tp={spec.size('tp')}")
    if faults:
        raise LayoutError(
            f"layout {spec}: the files of ranks do not tell {', '.join(faults)}; leave out dp and "
            "vpp, and let etp be tp"
        )
    dense, expert = make_grids(spec)
    num_ranks = spec.size("pp") * spec.size("tp") * spec.size("ep")
    names = []
    for rank in range(num_ranks):
        tp, pp, ep = (
            0 if axis is None else axis.coordinate(rank) for axis in (dense.tp, dense.pp, expert.ep)
        )
        names.append(
            f"mp_rank_{tp:02d}"
            + (f"_{pp:03d}" if spec.size("pp") > 1 else "")
            + (f"_{ep:03d}" if spec.size("ep") > 1 else "")
        )
    return names


def write_megatron(
    folder: Path,
    spec: str,
    ranks: Sequence[Mapping[str, TensorSpec]],
    read: Callable[[int, str], Tensor],
) -> None:
    """Write the folder that Megatron is told to load, rank by rank: one file is in memory.

    Raises:
        OSError: it cannot be written. LayoutError: as `rank_folders`. Whatever `read` raises.
    """
    for rank, name in enumerate(rank_folders(parse_layout(spec))):
        file = folder / RELEASE / name / FILE
        file.parent.mkdir(parents=True)
        weights = {local: _alone(read(rank, local)) for local in ranks[rank]}
        content = {"model": weights, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
        try:
            torch.save(content, file)
        except RuntimeError as error:
            raise as_disk_error(error) from error
    (folder / TRACKER).write_text(RELEASE + "\n", encoding="utf-8")


def _alone(tensor: Tensor) -> Tensor:
    """A file would have all of the storage that a view is part of."""
    is_view = tensor.untyped_storage().size() != tensor.nbytes
    return tensor.clone() if is_view or not tensor.is_contiguous() else tensor


def _told_spec(path: Path) -> str:
    found = [match for match in map(_FOLDER.fullmatch, _folder_names(path)) if match]
    first = load_torch_file(path / found[0][0] / FILE).get("args")
    told = first.state if isinstance(first, Inert) and isinstance(first.state, dict) else {}
    numbers = [[int(group) for group in match.groups() if group] for match in found]
    width = max(map(len, numbers))
    sizes = [max(row[i] for row in numbers if len(row) > i) + 1 for i in range(width)]
    tp, *rest = sizes
    is_ep = len(rest) == 1 and told.get("pipeline_model_parallel_size", 2) == 1
    pp, ep = [1, *rest] if is_ep else [*rest, 1, 1][:2]
    axes = {"pp": pp, "ep": ep, "tp": tp}
    text = ",".join(f"{name}={size}" for name, size in axes.items() if size > 1)
    return f"megatron:{text or 'tp=1'}"


def _folder_names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if _FOLDER.fullmatch(entry.name))


def _check_folders(path: Path, spec: str, names: Sequence[str]) -> None:
    there = _folder_names(path)
    faults = [
        f"no {name}/{FILE} of rank {rank}"
        for rank, name in enumerate(names)
        if not (path / name / FILE).is_file()
    ]
    faults += [f"{name} is of no rank" for name in there if name not in names]
    if faults:
        raise CheckpointError(
            f"{path}: {spec} has {len(names)} ranks, there are folders of {len(there)}; "
            + "; ".join(faults)
            + "; copy the missing ones, or name the layout with --from megatron:pp=..,ep=..,tp=.."
        )


def _weights(file: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    if "model0" in content:
        raise CheckpointError(
            f"{file}: has several virtual stages (model0, model1, ...), which are not read; save "
            "without --num-layers-per-virtual-pipeline-stage"
        )
    weights = content.get("model")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{file}: has no mapping 'model'; is it a file of Megatron-Core?")
    kept = {name: value for name, value in weights.items() if not name.endswith(NO_WEIGHTS)}
    odd = [name for name, value in kept.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(f"{file}: {', '.join(odd)} in 'model' are no tensors")
    return kept
