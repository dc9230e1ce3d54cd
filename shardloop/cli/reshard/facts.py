"""What a plan comes to, as plain data that JSON can hold; the table prints it. Floor 5.

`document(planned)` is the JSON of `shardloop reshard plan --json`, described in docs/resharding.md.
Its parts: request, proof, model, src, dst, traffic, plan, with `--rank` also rank and transfers,
and seconds, which are nobody's claim.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from shardloop.cli.reshard.request import Planned
from shardloop.errors import UsageError
from shardloop.families.base import ITEMSIZE
from shardloop.layout import Layout, parse_layout
from shardloop.layout.layout import View
from shardloop.reshard.cost import Cost
from shardloop.reshard.flow import Runs, Transfer

FORMAT = "shardloop-reshard-plan"
VERSION = 1
BUCKET_BYTES = 4 * 2**20
"""Of the messages that are counted: what the executors use by default."""
BUFFERS = 2
"""Buckets that a rank stages at a time in each direction."""
MAX_PAIRS = 1024
"""Pairs of ranks that are listed, the largest first."""

AXIS_WORDS = {
    "dp": "{} replicas",
    "fsdp": "dim 0 in {} shards",
    "zero3": "flat in {} shards",
    "tp": "tensor parallel {}",
    "pp": "{} pipeline stages",
    "vpp": "{} chunks of layers a stage",
    "ep": "experts over {}",
    "etp": "each expert over {}",
    "replicas": "{} replicas",
}
"""What each axis of a layout does; a layout's words follow its string's order."""

SCHEME_WORDS = {
    "hf": "Hugging Face names",
    "megatron": "Megatron names",
    "engine": "fused as in an engine",
}


def document(planned: Planned, *, in_full: bool = True) -> dict[str, Any]:
    """
    Args:
        in_full: with every transfer of the request's rank, if it names one.
    Raises:
        UsageError: the request's rank takes no part.
    """
    parts = {
        "format": FORMAT,
        "version": VERSION,
        "request": asdict(planned.request),
        "proof": {
            "digest": planned.proof.digest,
            "text": str(planned.proof),
            "num_classes": planned.proof.num_classes,
            "num_boxes": planned.proof.num_boxes,
        },
        "model": _model(planned),
        "src": _side(planned.plan.src, planned.plan.src_ranks),
        "dst": _side(planned.plan.dst, planned.plan.dst_ranks),
        "traffic": _traffic(planned),
        "plan": planned.plan.summary(),
        "seconds": dict(planned.seconds),
    }
    rank, plan = planned.request.rank, planned.plan
    if rank is None:
        return parts
    if rank not in plan.ranks:
        raise UsageError(f"rank={rank} takes no part; choose from {spans(plan.ranks)}")
    parts["rank"] = {
        "rank": rank,
        "sends": _kinds(planned, plan.runs_from(rank), "dst"),
        "receives": _kinds(planned, plan.runs_to(rank), "src"),
    }
    if in_full:
        ends = {"sends": plan.sends(rank), "receives": plan.receives(rank)}
        parts["transfers"] = {
            way: [_transfer(transfer, planned.itemsize) for transfer in transfers]
            for way, transfers in ends.items()
        }
    return parts


def _model(planned: Planned) -> dict[str, Any]:
    model = planned.plan.dst.model
    tensors = sum(
        (c.layers[1] - c.layers[0]) * (c.experts[1] - c.experts[0]) for c in model.classes
    )
    return {
        "name": planned.request.model,
        "family": model.name,
        "num_elements": model.num_parameters,
        "num_bytes": model.num_bytes(planned.itemsize),
        "num_tensors": tensors,
        "num_classes": len(model.classes),
    }


def _side(layout: Layout, ranks: Sequence[int]) -> dict[str, Any]:
    return {
        "layout": layout.spec,
        "words": layout_words(layout.spec),
        "world_size": layout.world_size,
        "ranks": list(ranks),
    }


def layout_words(text: str) -> str:
    """Such as `dim 0 in 4 shards, tensor parallel 2, Hugging Face names`."""
    spec = parse_layout(text)
    axes = [AXIS_WORDS[name].format(size) for name, size in spec.axes if size > 1]
    return ", ".join([*(axes or ["all on each rank"]), SCHEME_WORDS[spec.scheme]])


def _traffic(planned: Planned) -> dict[str, Any]:
    """Bytes by pair and by rank, messages, staging, and the least seconds at a network's speed."""
    found = planned.cost
    busiest = max([0, *found.send_bytes.values(), *found.receive_bytes.values()])
    return {
        "wire_bytes": found.wire_bytes,
        "minimum_bytes": found.minimum_bytes,
        "ratio": found.wire_bytes / found.minimum_bytes if found.minimum_bytes else 1.0,
        "local_bytes": found.local_bytes,
        "num_transfers": found.num_transfers,
        "send_imbalance": found.send_imbalance,
        "receive_imbalance": found.receive_imbalance,
        "bucket_bytes": BUCKET_BYTES,
        "num_messages": int((-(-found.matrix // BUCKET_BYTES)).sum()),
        "staging_bytes": _staging_bytes(found),
        "least_seconds": busiest / (planned.request.gb_per_s * 1e9),
        "send_bytes": [[rank, num_bytes] for rank, num_bytes in found.send_bytes.items()],
        "receive_bytes": [[rank, num_bytes] for rank, num_bytes in found.receive_bytes.items()],
        "num_pairs": int(np.count_nonzero(found.matrix)),
        "pair_bytes": _largest_pairs(found),
    }


def _largest_pairs(found: Cost) -> list[list[int]]:
    """Source rank, destination rank and bytes, the most bytes first, then by rank. Of all pairs,
    which may be millions, only the largest are sorted."""
    rows, columns = np.argsort(found.src_ranks), np.argsort(found.dst_ranks)
    sizes = found.matrix[np.ix_(rows, columns)].reshape(-1)
    count = min(MAX_PAIRS, int(np.count_nonzero(sizes)))
    if not count:
        return []
    least = np.partition(sizes, -count)[-count]
    above = np.flatnonzero(sizes > least)
    chosen = np.concatenate([above, np.flatnonzero(sizes == least)[: count - len(above)]])
    chosen = chosen[np.argsort(-sizes[chosen], kind="stable")]
    return [
        [found.src_ranks[rows[s]], found.dst_ranks[columns[d]], size]
        for s, d, size in zip(
            *(at.tolist() for at in np.divmod(chosen, len(columns))),
            sizes[chosen].tolist(),
            strict=True,
        )
    ]


def _staging_bytes(found: Cost) -> int:
    """Of the rank that needs most: two buckets, no larger than what a pair has, each way."""
    needed: Counter[int] = Counter()
    for axis, ranks in ((1, found.src_ranks), (0, found.dst_ranks)):
        largest = np.minimum(found.matrix.max(axis=axis), BUCKET_BYTES)
        needed.update(dict(zip(ranks, (BUFFERS * largest).tolist(), strict=True)))
    return max(needed.values())


def _kinds(planned: Planned, runs: Iterator[Runs], end: str) -> list[dict[str, Any]]:
    """What moves, a row for each class of tensors; `end` is the far one, src or dst."""
    ranks = planned.plan.src_ranks if end == "src" else planned.plan.dst_ranks
    rows = []
    for some in runs:
        if not len(some):
            continue
        each = _itemsize(some.flow.tensor_class.dtype, planned.itemsize)
        layers = {
            layer
            for lo, hi, step in zip(some.lo[:, 0], some.hi[:, 0], some.step, strict=True)
            for layer in range(int(lo), int(hi), int(step))
        }
        rows.append(
            {
                "template": some.flow.tensor_class.template,
                "local_template": some.flow.dst.template,
                "layers": sorted(layers),
                "peers": sorted({ranks[peer] for peer in getattr(some, end).tolist()}),
                "num_transfers": int(some.num_transfers.sum()),
                "num_bytes": int(some.num_elements.sum()) * each,
            }
        )
    return rows


def _itemsize(dtype: str | None, models: int) -> int:
    return models if dtype is None else ITEMSIZE[dtype]


def _transfer(transfer: Transfer, itemsize: int) -> dict[str, Any]:
    return {
        "src_rank": transfer.src_rank,
        "dst_rank": transfer.dst_rank,
        "name": transfer.name,
        "num_bytes": transfer.num_elements * _itemsize(transfer.dtype, itemsize),
        "box": [list(run) for run in transfer.box],
        "dtype": transfer.dtype,
        "src": _view(transfer.src),
        "dst": _view(transfer.dst),
    }


def _view(view: View) -> dict[str, Any]:
    """A slice is [first, end]; a number takes one place of its dim."""
    return {
        "local_name": view.local_name,
        "slices": [s if isinstance(s, int) else [s.start, s.stop] for s in view.slices],
        "shape": list(view.shape),
        "inner": [[s.start, s.stop] for s in view.inner],
    }


def spans(ranks: Sequence[int]) -> str:
    """Ranks in their order, such as `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{lo}-{hi}" if hi > lo else str(lo) for lo, hi in runs)
