"""Other ways to plan: a loop over all pairs, a Python object per record, and DCP's planner.

Called by `benchmarks.reshard_planning`, each in a fresh process, at a size that they can do. Before
anything is compared, each must have found the boxes of our plan.
"""

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.reshard_cases import Case, planned
from shardloop.layout import Box, Layout, Piece
from shardloop.reshard.plan import Plan

Found = set[tuple[int, int, str, Box]]
"""Source rank, destination rank, tensor and box."""


def all_pairs(case: Case) -> dict[str, Any]:
    """For each tensor, every box of the source against every box of the destination, in Python."""
    plan, _ = planned(case)
    sources, targets = _pieces_by_name(plan.src), _pieces_by_name(plan.dst)
    began, num_pairs = time.perf_counter(), 0
    found: Found = set()
    for name, holders in sources.items():
        for source, target in product(holders, targets[name]):
            num_pairs += 1
            box = tuple(
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(source.box, target.box, strict=True)
            )
            if all(lo < hi for lo, hi in box):
                ranks = plan.src_ranks[source.rank], plan.dst_ranks[target.rank]
                found.add((*ranks, name, box))
    seconds = time.perf_counter() - began
    _require_equal(found, _ours(plan), "the loop over all pairs")
    return {"seconds": seconds, "num_pairs": num_pairs, "us_per_pair": 1e6 * seconds / num_pairs}


def per_record(case: Case) -> dict[str, Any]:
    """Our own plan written out, one Python object for each box of each tensor and destination."""
    plan, _ = planned(case)
    began = time.perf_counter()
    num_records = sum(len(plan.receives(rank)) for rank in plan.dst_ranks)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "num_records": num_records,
        "us_per_record": 1e6 * seconds / num_records,
    }


def dcp(case: Case) -> dict[str, Any]:
    """What DCP plans for one destination rank: the global save plan, then that rank's reads.

    The ranks' own lists of what they hold are made before its clock starts. Ours is all of it: both
    layouts, the plan, its proof, and the same rank's list written out.
    """
    plan, times_ms = planned(case)
    rank = plan.dst_ranks[0]
    began = time.perf_counter()
    ours = plan.receives(rank)
    ours_s = sum(times_ms.values()) / 1e3 + time.perf_counter() - began
    saved = [SavePlan(_write_items(plan.src, r)) for r in range(plan.src.world_size)]
    wanted: dict[str, list[ChunkStorageMetadata]] = {}
    for piece in plan.dst.pieces(0):
        wanted.setdefault(piece.name, []).append(_chunk(piece.box))
    began = time.perf_counter()
    _, metadata = create_default_global_save_plan(saved)
    reads = [
        item
        for name, chunks in wanted.items()
        for item in create_read_items_for_chunk_list(
            name, metadata.state_dict_metadata[name], chunks
        )
    ]
    dcp_s = time.perf_counter() - began
    boxes = [(item.dest_index.fqn, tuple(item.lengths)) for item in reads]
    sizes = [(t.name, tuple(hi - lo for lo, hi in t.box)) for t in ours]
    _require_equal(set(boxes), set(sizes), "DCP's planner")
    return {"dcp_s": dcp_s, "ours_s": ours_s, "num_reads": len(reads)}


def _pieces_by_name(layout: Layout) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            found.setdefault(piece.name, []).append(piece)
    return found


def _ours(plan: Plan) -> Found:
    return {
        (t.src_rank, t.dst_rank, t.name, t.box)
        for rank in plan.dst_ranks
        for t in plan.receives(rank)
    }


def _write_items(layout: Layout, rank: int) -> Sequence[WriteItem]:
    shapes = layout.model.tensor_shapes()
    properties = TensorProperties(dtype=torch.bfloat16)
    return [
        WriteItem(
            index=MetadataIndex(piece.name, torch.Size(lo for lo, _ in piece.box)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(piece.box),
                properties=properties,
                size=torch.Size(shapes[piece.name]),
            ),
        )
        for piece in layout.pieces(rank)
    ]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(lo for lo, _ in box), sizes=torch.Size(hi - lo for lo, hi in box)
    )


def _require_equal(found: Any, ours: Any, what: str) -> None:
    if found != ours:
        raise SystemExit(f"{what} found other boxes: {len(found)}, our plan has {len(ours)}")
