"""From one checkpoint to another, tensor by tensor, proved before and compared after. Floor 3.

Called by `shardloop checkpoint convert`.

    faults of source and request, all listed ──▶ plan ──▶ proof
      ──▶ .NAME.unfinished/: each destination tensor made from the plan's transfers, and written
      ──▶ read again: fingerprints equal ──▶ on the disk ──▶ renamed to NAME

Whatever fails or is killed before the last step, there is no folder NAME.
"""

import fcntl
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shardloop.checkpoint.folder import remove, sync_to_disk, unfinished_name
from shardloop.convert.compare import Progress, differing
from shardloop.convert.sources import Source, open_source, source_faults
from shardloop.convert.store import listed, read_view
from shardloop.convert.targets import Target
from shardloop.errors import CheckpointError, FingerprintError, UsageError
from shardloop.hf.shards import TensorSpec
from shardloop.layout import Layout, make_layout
from shardloop.reshard.flow import Transfer
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify


@dataclass(frozen=True, kw_only=True)
class Report:
    path: Path
    num_tensors: int
    """Canonical ones."""
    num_bytes: int
    """Written, padding and copies included."""
    converted: dict[str, int]
    """Tensors whose dtype was changed, by `from -> to`."""
    proof: str


def convert(
    source: Source,
    target: Target,
    path: Path,
    *,
    dtype: torch.dtype | None,
    progress: Progress,
) -> Report:
    """Write `source` as a new folder `path` in another format and layout.

    Args:
        dtype: of all weights whose dtype the model leaves open; None: each keeps its own.
    Raises:
        UsageError: `path` exists. LayoutError: the model does not fit the target's layout.
        CheckpointError: the source does not fit its model, holds what one tensor of the
            destination cannot (two dtypes), is damaged, or the folder cannot be written.
        FingerprintError: what was written differs from the source; it is removed.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; choose another path, or remove it first")
    layout = make_layout(source.model, target.spec)
    if faults := source_faults(source):
        raise CheckpointError(
            f"{source.reader.path}: does not fit its model; nothing was written:{listed(faults)}"
        )
    stored = source.dtypes()
    wanted = {name: _wanted(source, name, dtype or own) for name, own in stored.items()}
    ranks = _specs(layout, wanted)
    proof = verify(plan_reshard(source.layout, layout))
    job = _Job(source=source, plan=proof.plan, ranks=ranks, progress=progress)
    with _unfinished(path) as unfinished:
        target.write(
            unfinished,
            ranks=ranks,
            read=job.read,
            config=source.config,
            tokenizer_from=source.folder,
        )
        _compare(source, target, unfinished, wanted, progress)
        _publish(unfinished, path)
    return Report(
        path=path,
        num_tensors=len(stored),
        num_bytes=job.num_bytes,
        converted=_changed(stored, wanted),
        proof=str(proof),
    )


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` for this process alone, which is removed if the block fails.

    Raises:
        UsageError: another process is writing there. CheckpointError: for an OSError of the block.
    """
    folder = unfinished_name(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _own(descriptor, folder)
            try:
                for left in list(folder.iterdir()):  # by one that was killed
                    remove(left)
                yield folder
            except BaseException:
                remove(folder)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def _own(descriptor: int, folder: Path) -> None:
    """A lock that ends with the process, however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{folder}: another conversion is writing there; wait for it, or choose another path"
        ) from error
    if not os.path.samestat(os.fstat(descriptor), folder.stat()):
        raise UsageError(f"{folder}: another conversion has just ended there; choose another path")


def _changed(stored: dict[str, torch.dtype], wanted: dict[str, torch.dtype]) -> dict[str, int]:
    pairs = [(own, wanted[name]) for name, own in stored.items() if wanted[name] != own]
    return dict(Counter(f"{a} -> {b}".replace("torch.", "") for a, b in pairs))


def _wanted(source: Source, name: str, dtype: torch.dtype) -> torch.dtype:
    declared = source.declared_dtypes.get(name)
    return dtype if declared is None else declared


def _specs(layout: Layout, dtypes: dict[str, torch.dtype]) -> list[dict[str, TensorSpec]]:
    """What each rank of the destination is to hold.

    Raises:
        CheckpointError: tensors that are one at the destination have different dtypes.
    """
    found: dict[tuple[int, str], set[torch.dtype]] = defaultdict(set)
    by_name: dict[str, torch.dtype] = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            found[rank, piece.local_name].add(dtypes[piece.name])
            by_name[piece.local_name] = dtypes[piece.name]
    mixed = [
        f"rank {rank}: {name} would be of {' and '.join(sorted(map(str, kinds)))}"
        for (rank, name), kinds in found.items()
        if len(kinds) > 1
    ]
    if mixed:
        raise CheckpointError(f"choose one with --dtype; nothing was written:{listed(mixed)}")
    return [
        # A shard that is padding alone has the dtype of the others.
        {
            name: TensorSpec(shape, by_name[name])
            for name, shape in layout.local_shapes(rank).items()
        }
        for rank in range(layout.world_size)
    ]


@dataclass(kw_only=True)
class _Job:
    """Makes the tensors of the destination; holds the transfers of one rank at a time."""

    source: Source
    plan: Plan
    ranks: list[dict[str, TensorSpec]]
    progress: Progress
    num_done: int = 0
    _rank: int = -1
    _parts: dict[str, list[Transfer]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for specs in self.ranks for spec in specs.values())

    def read(self, rank: int, name: str) -> Tensor:
        """A tensor of the destination, in its dtype, its padding 0."""
        spec = self.ranks[rank][name]
        made = self._make(spec, self._transfers(rank).get(name, []))
        self.num_done += spec.num_bytes
        self.progress("written", self.num_done, self.num_bytes)
        return made

    def _transfers(self, rank: int) -> dict[str, list[Transfer]]:
        if rank != self._rank:
            parts = defaultdict(list)
            for transfer in self.plan.receives(self.plan.dst_ranks[rank]):
                parts[transfer.dst.local_name].append(transfer)
            self._rank, self._parts = rank, parts
        return self._parts

    def _make(self, spec: TensorSpec, transfers: list[Transfer]) -> Tensor:
        if len(transfers) == 1:  # one that comes in one piece needs no second place in memory
            part = read_view(self.source.reader, transfers[0].src_rank, transfers[0].src)
            if tuple(part.shape) == spec.shape:
                return part.to(spec.dtype)
        made = torch.zeros(spec.shape, dtype=spec.dtype)
        for transfer in transfers:
            part = read_view(self.source.reader, transfer.src_rank, transfer.src)
            transfer.dst.of({transfer.dst.local_name: made}).copy_(part)
        return made


def _compare(
    source: Source,
    target: Target,
    folder: Path,
    dtypes: dict[str, torch.dtype],
    progress: Progress,
) -> None:
    given = target.spec if target.format == "megatron" else target.format
    written = open_source(folder, given=given, config=source.config)
    faults = source_faults(written)
    faults = faults or differing(source, written, dtypes=dtypes, progress=progress)
    if faults:
        raise FingerprintError(f"what was written differs from the source:{listed(faults)}")


def _publish(unfinished: Path, path: Path) -> None:
    for file in sorted(unfinished.rglob("*")):
        sync_to_disk(file)
    sync_to_disk(unfinished)
    os.rename(unfinished, path)
    sync_to_disk(path.parent)
