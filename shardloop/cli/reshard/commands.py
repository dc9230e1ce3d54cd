"""`shardloop reshard plan` and `verify`: what moves between two layouts, and its proof. Floor 5.

No torch, no weights, no processes: a plan is made from a model's config and two layout strings.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardloop.cli.reshard.facts import document
from shardloop.cli.reshard.options import Options, asked
from shardloop.cli.reshard.picture import check_picture, draw_map
from shardloop.cli.reshard.request import GB_PER_S, make
from shardloop.cli.reshard.saved import same_plan
from shardloop.cli.reshard.table import plan_lines
from shardloop.cli.reshard.tensor_map import tensor_map
from shardloop.cli.streams import tell
from shardloop.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan the way of a model's weights from one layout to another: who sends what to whom."""

    options: Annotated[Options, tyro.conf.arg(name="")]
    gb_per_s: float = GB_PER_S
    """Speed of a rank's network in each direction, in GB/s (1e9 bytes), for the time."""
    rank: int | None = None
    """Also list what this rank sends and receives; in the JSON, every transfer of it."""
    json: str | None = None
    """Write the plan as JSON to this file; - writes it to standard output, instead of the table."""
    picture: Path | None = None
    """Draw where one tensor's rows lie and go, as .png, .svg or .pdf."""
    tensor: str | None = None
    """Which tensor to draw, such as model.layers.3.mlp.up_proj.weight or qkv_proj.weight; by
    default the one with the query heads."""


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Prove a plan: of two layouts, or the one in a file that `plan --json` wrote."""

    file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FILE")] = None
    """The JSON of a plan. It is made again from its request, and must be the same."""
    options: Annotated[Options, tyro.conf.arg(name="")]


EXAMPLES = """\
examples:
  shardloop reshard plan --model Qwen3-0.6B --src fsdp=8 --dst engine:tp=4
  shardloop reshard plan --model Llama-3-70B --src fsdp=4,tp=2 \\
      --dst engine:replicas=2,tp=4 --colocate
  shardloop reshard plan --model DeepSeek-V3 --src megatron:pp=16,ep=64,dp=2 \\
      --dst engine:replicas=32,ep=64,tp=8 --rank 7 --json plan.json
  shardloop reshard plan --model Qwen3-0.6B --src fsdp=4 --dst engine:tp=2 --picture map.svg
  shardloop reshard verify --model Qwen3-0.6B --src fsdp=8 --dst engine:tp=4
  shardloop reshard verify plan.json
"""

CHECKED = """\
checked, for every rank and every tensor, from the layouts and not from the planner's word:
  ranks    each rank has one place in each layout
  names    no rank gives two tensors one name
  flows    all that the destination shows comes from tensors that show the same
  places   what the plan reads and writes lies where the layouts declare it
  whole    neither side leaves out an element
  once     what arrives covers each element exactly once, with no gap and no overlap (exact; where
           a layout is flat over several dims a wrong plan passes with a chance below 2^-41)
  held     whoever sends an element holds it, and no lost rank sends
  turns    sender and receiver work out the same list
checked when it is carried out: that live tensors have the declared names and shapes (before the
first message), and that the bytes arrived (fingerprints, after the last)"""


def run(arguments: Sequence[str]) -> int:
    """
    Raises:
        ShardloopError: see `shardloop.errors`; nothing is written then.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        raise SystemExit(0 if arguments else 2)
    name, *rest = arguments
    if name not in ACTIONS:
        raise UsageError(f"no command reshard {name!r}; choose from {', '.join(ACTIONS)}")
    command, act = ACTIONS[name]
    act(tyro.cli(command, prog=f"shardloop reshard {name}", args=rest))
    return 0


def _print_help() -> None:
    for name, (command, _) in ACTIONS.items():
        with suppress(SystemExit):
            tyro.cli(command, prog=f"shardloop reshard {name}", args=["--help"])
    print(EXAMPLES, end="")


def _plan(command: PlanCommand) -> None:
    if command.picture is not None:
        check_picture(command.picture)
    elif command.tensor is not None:
        raise UsageError("--tensor chooses what to draw; add --picture FILE")
    planned = make(asked(command.options, gb_per_s=command.gb_per_s, rank=command.rank))
    facts = document(planned, in_full=command.json is not None)
    text = json.dumps(facts, indent=1) + "\n"
    if command.picture is not None:
        shown = tensor_map(planned.plan, command.tensor)
        title = f"{planned.request.model} · {facts['src']['layout']} → {facts['dst']['layout']}"
        with _writing("picture", command.picture):
            draw_map(shown, planned.plan.dst.model, command.picture, title=title)
    if command.json not in (None, "-"):
        with _writing("json", Path(command.json)):
            Path(command.json).write_text(text, encoding="utf-8")
    print(text if command.json == "-" else "\n".join([*plan_lines(facts), ""]), end="")


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{flag}={str(path)!r} cannot be written: {reason}") from error
    tell(f"{flag}: {path}")


def _verify(command: VerifyCommand) -> None:
    if command.file is None:
        planned = make(asked(command.options))
    else:
        if command.options != Options():
            raise UsageError("a file says what it is the plan of; leave out the other options")
        planned = same_plan(command.file)
    print(planned.proof)
    print(f"digest {planned.proof.digest}")
    print(CHECKED)


ACTIONS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "plan": (PlanCommand, _plan),
    "verify": (VerifyCommand, _verify),
}
