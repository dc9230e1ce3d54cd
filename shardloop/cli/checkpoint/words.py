"""A checkpoint as JSON data, and that as a table. Called by `cli.checkpoint.commands`. Floor 5."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardloop.convert import Source, source_faults
from shardloop.convert.formats import FORMATS
from shardloop.convert.look import Place, files, groups, runs
from shardloop.convert.store import MOST_LISTED, Reader
from shardloop.reshard.cost import bytes_text

SHOWN_SHAPES = 3
BESIDE = re.compile(r"(optim\.[^.]+|reference)\.")
"""Names in a run's checkpoint of tensors that belong to a weight of the same name."""


def document(reader: Reader, source: Source | str, found: Sequence[Place] | None) -> dict[str, Any]:
    """Everything that inspect tells, as JSON can hold it.

    Args:
        source: or the reason why its model is not known.
    """
    tables = groups(reader)
    facts: dict[str, Any] = {
        "path": str(reader.path),
        "format": reader.format,
        "format_words": FORMATS[reader.format],
        "layout": reader.spec,
        "num_ranks": reader.num_ranks,
        "notes": dict(reader.notes),
        "model": _model(source) if isinstance(source, Source) else None,
        "model_unknown": None if isinstance(source, Source) else source,
        "num_tensors": sum(group.count for group in tables),
        "num_bytes": sum(group.num_bytes for group in tables),
        "files": {str(file): size for file, size in files(reader).items()},
        "groups": [
            {
                "name": group.name,
                "count": group.count,
                "shapes": [list(shape) for shape in group.shapes],
                "dtypes": list(group.dtypes),
                "num_bytes": group.num_bytes,
                "ranks": list(group.ranks),
            }
            for group in tables
        ],
    }
    if found is not None:
        facts["places"] = [
            {
                "rank": place.rank,
                "local_name": place.local_name,
                "box": [list(run) for run in place.box],
                "file": str(place.file),
            }
            for place in found
        ]
    return facts


def _model(source: Source) -> dict[str, Any]:
    return {
        "family": source.model.name,
        "num_layers": source.model.num_layers,
        "num_parameters": source.model.num_parameters,
        "faults": source_faults(source),
    }


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"{'path':10}{facts['path']}"
    yield f"{'format':10}{facts['format']} ({facts['format_words']})"
    if facts["num_ranks"] > 1:
        yield f"{'layout':10}{facts['layout']}: {facts['num_ranks']} ranks"
    for name, text in facts["notes"].items():
        yield f"{'':10}{name}: {text}"
    yield from _model_lines(facts["model"], facts["model_unknown"])
    count = len(facts["files"])
    yield (
        f"{'tensors':10}{facts['num_tensors']:,} in {count} {'file' if count == 1 else 'files'}, "
        f"{bytes_text(facts['num_bytes'])}"
    )
    yield ""
    yield from _group_lines(facts["groups"], ranks=facts["num_ranks"])
    if "places" in facts:
        yield ""
        yield from (_place_line(place) for place in facts["places"])


def _model_lines(model: Mapping[str, Any] | None, reason: str | None) -> Iterator[str]:
    if model is None:
        yield f"{'model':10}not known: {reason}"
        return
    yield (
        f"{'model':10}{model['family']}, {model['num_layers']} layers, "
        f"{model['num_parameters']:,} elements"
    )
    faults = model["faults"]
    yield from (f"{'misfit':10}{fault}" for fault in faults[:MOST_LISTED])
    if len(faults) > MOST_LISTED:
        yield f"{'misfit':10}and {len(faults) - MOST_LISTED} more"


def _group_lines(groups: Sequence[Mapping[str, Any]], *, ranks: int) -> Iterator[str]:
    """A line for each group of weights, then one for each kind of what a run keeps beside them."""
    beside: dict[str, Counter[str]] = {}
    weights = []
    for group in groups:
        if match := BESIDE.match(group["name"]):
            kind = beside.setdefault(match[1], Counter())
            kind.update(tensors=group["count"], num_bytes=group["num_bytes"])
        else:
            weights.append(group)
    width = max([len(group["name"]) for group in weights], default=0)
    yield from (_group_line(group, width, ranks=ranks) for group in weights)
    for name, kind in beside.items():
        size = bytes_text(kind["num_bytes"])
        yield f"{f'{name}.*':{width}}  {kind['tensors']:>6} tensors, {size}"


def _group_line(group: Mapping[str, Any], width: int, *, ranks: int) -> str:
    shapes = [" x ".join(map(str, shape)) or "scalar" for shape in group["shapes"]]
    if len(shapes) > SHOWN_SHAPES:
        shapes = [*shapes[:SHOWN_SHAPES], f"and {len(shapes) - SHOWN_SHAPES} more"]
    text = (
        f"{group['name']:{width}}  {group['count']:>6} x [{' | '.join(shapes)}] "
        f"{'/'.join(group['dtypes'])}, {bytes_text(group['num_bytes'])}"
    )
    partly = len(group["ranks"]) < ranks
    return f"{text}, ranks {runs(group['ranks'])}" if partly else text


def _place_line(place: Mapping[str, Any]) -> str:
    box = ", ".join(f"{lo}:{hi}" for lo, hi in place["box"])
    return f"rank {place['rank']} has [{box}] in {place['local_name']} of {place['file']}"
