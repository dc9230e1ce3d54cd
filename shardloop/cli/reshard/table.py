"""A plan as text for a terminal. Called by `shardloop reshard`; reads `facts.document`. Floor 5."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardloop.cli.reshard.facts import spans
from shardloop.reshard.cost import bytes_text

MATRIX = 16
"""Ranks of a side up to which all pairs are printed."""
MAX_PEERS = 24
"""Characters of a list of ranks; of longer ones the number is told."""
LISTED = 5
"""Ranks and pairs listed where there are more."""


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def plan_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The whole table, line by line."""
    model, traffic, seconds = facts["model"], facts["traffic"], facts["seconds"]
    yield (
        f"{'model':9}{model['name']} ({model['family']}): {model['num_elements']:,} elements, "
        f"{bytes_text(model['num_bytes'])}, {model['num_tensors']:,} tensors of "
        f"{model['num_classes']} kinds"
    )
    for title, side in (("from", facts["src"]), ("to", facts["dst"])):
        yield f"{title:9}{_side_words(side)}"
    if facts["request"]["lost"]:
        yield f"{'lost':9}ranks {spans(facts['request']['lost'])} send nothing"
    yield ""
    few = max(facts["src"]["world_size"], facts["dst"]["world_size"]) <= MATRIX
    yield from _matrix(facts) if few else _busiest(traffic)
    yield from _idle(traffic)
    yield ""
    yield from _totals(traffic, facts["request"]["gb_per_s"])
    planning = seconds["layouts"] + seconds["plan"]
    yield _row("planned in", seconds_text(planning), f"proved in {seconds_text(seconds['proof'])}")
    yield ""
    yield facts["proof"]["text"]
    if "rank" in facts:
        yield from _of_rank(facts["rank"])


def _side_words(side: Mapping[str, Any]) -> str:
    count = side["world_size"]
    ranks = f"{count:,} {'rank' if count == 1 else 'ranks'} ({spans(side['ranks'])})"
    return f"{side['layout']}: {ranks}; {side['words']}"


def _row(title: str, value: str, note: str = "") -> str:
    return f"{title:18}{value:>12}   {note}".rstrip()


def _totals(traffic: Mapping[str, Any], gb_per_s: float) -> Iterator[str]:
    wire, least = traffic["wire_bytes"], traffic["minimum_bytes"]
    yield _row("on the wire", bytes_text(wire), f"in {traffic['num_transfers']:,} boxes")
    yield _row("least possible", bytes_text(least), f"ratio {traffic['ratio']:.3f}")
    yield _row("copied in place", bytes_text(traffic["local_bytes"]))
    for side, key in (("sender", "send_imbalance"), ("receiver", "receive_imbalance")):
        yield _row(f"busiest {side}", f"{traffic[key]:.2f} x", f"the mean {side}")
    bucket = bytes_text(traffic["bucket_bytes"])
    yield _row("messages", f"{traffic['num_messages']:,}", f"of up to {bucket}")
    yield _row("staging", bytes_text(traffic["staging_bytes"]), "on the rank that stages most")
    speed = f"at {gb_per_s:g} GB/s each way a rank, if nothing else bounds it"
    yield _row("time, at least", seconds_text(traffic["least_seconds"]), speed)


def _matrix(facts: Mapping[str, Any]) -> Iterator[str]:
    """Bytes from each source rank (row) to each destination rank (column)."""
    sources, targets = facts["src"]["ranks"], facts["dst"]["ranks"]
    num_bytes = {(src, dst): n for src, dst, n in facts["traffic"]["pair_bytes"]}
    sent = dict(facts["traffic"]["send_bytes"])
    received = dict(facts["traffic"]["receive_bytes"])
    rows = [["from \\ to", *map(str, targets), "sum"]]
    for src in sources:
        cells = [_cell(num_bytes.get((src, dst), 0)) for dst in targets]
        cells = ["same" if src == dst else c for c, dst in zip(cells, targets, strict=True)]
        rows.append([str(src), *cells, _cell(sent.get(src, 0))])
    total = facts["traffic"]["wire_bytes"]
    rows.append(["sum", *(_cell(received.get(dst, 0)) for dst in targets), _cell(total)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _cell(num_bytes: int) -> str:
    return bytes_text(num_bytes) if num_bytes else "-"


def _busiest(traffic: Mapping[str, Any]) -> Iterator[str]:
    for side, verb in (("sender", "send"), ("receiver", "receive")):
        ranked = sorted(traffic[f"{verb}_bytes"], key=lambda item: (-item[1], item[0]))
        if bytes_text(ranked[0][1]) == bytes_text(ranked[-1][1]):
            yield f"{f'{side}s':18}{len(ranked):,} ranks, each {bytes_text(ranked[0][1])}"
            continue
        yield f"{f'busiest {side}s':18}{_listed(ranked[:LISTED])}"
        yield f"{f'idlest {side}s':18}{_listed(ranked[::-1][:LISTED])}"
    pairs = traffic["pair_bytes"][:LISTED]
    listed = [f"{src} -> {dst} {bytes_text(num_bytes)}" for src, dst, num_bytes in pairs]
    yield f"{'largest pairs':18}{', '.join(listed) or 'none'}; {traffic['num_pairs']:,} in all"


def _idle(traffic: Mapping[str, Any]) -> Iterator[str]:
    for side, verb in (("source", "send"), ("destination", "receive")):
        sizes = traffic[f"{verb}_bytes"]
        idle = [rank for rank, num_bytes in sizes if num_bytes == 0]
        if idle:
            yield f"{len(idle):,} of {len(sizes):,} {side} ranks {verb} nothing: {_peers(idle)}"


def _listed(ranked: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"rank {rank} {bytes_text(num_bytes)}" for rank, num_bytes in ranked)


def _of_rank(facts: Mapping[str, Any]) -> Iterator[str]:
    """What one rank sends and receives, a line for each kind of tensor."""
    for verb, way in (("sends", "to"), ("receives", "from")):
        yield ""
        if not facts[verb]:
            yield f"rank {facts['rank']} {verb} nothing"
            continue
        yield f"rank {facts['rank']} {verb}"
        rows = [["tensors", "layers", way, "boxes", "bytes"]]
        rows += [
            [
                kind["template"].replace("{layer}", "*").replace("{expert}", "*"),
                spans(kind["layers"]) if "{layer}" in kind["template"] else "",
                _peers(kind["peers"]),
                f"{kind['num_transfers']:,}",
                bytes_text(kind["num_bytes"]),
            ]
            for kind in facts[verb]
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [f"{cell:<{width}}" for cell, width in zip(row[:3], widths[:3], strict=True)]
            cells += [f"{cell:>{width}}" for cell, width in zip(row[3:], widths[3:], strict=True)]
            yield "  " + "  ".join(cells)


def _peers(ranks: Sequence[int]) -> str:
    text = spans(ranks)
    return text if len(text) <= MAX_PEERS else f"{len(ranks)} ranks"
