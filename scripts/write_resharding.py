"""Writes docs/resharding.svg, the map of one tensor, from a plan. Run by `make docs`.

It is what `shardloop reshard plan --picture` draws of the same plan.
"""

from pathlib import Path

from shardloop.cli.reshard.picture import draw_map
from shardloop.cli.reshard.tensor_map import tensor_map
from shardloop.families import canonical_model
from shardloop.families.public import public_model
from shardloop.layout import make_layout
from shardloop.reshard.plan import plan_reshard

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "resharding.svg"
MODEL, SRC, DST = "Qwen3-30B-A3B", "fsdp=4", "engine:tp=8"


def draw(path: Path) -> None:
    model = canonical_model(public_model(MODEL))
    plan = plan_reshard(make_layout(model, SRC), make_layout(model, DST))
    draw_map(tensor_map(plan), model, path, title=f"{MODEL} · {SRC} → {DST}")


if __name__ == "__main__":
    draw(PICTURE)
