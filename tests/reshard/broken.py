"""Plans of every kind, and ways to break them as data. Called by the tests of the proof.

A way to break a join takes it and a random generator, and gives a join that means something else,
or None where this join cannot be broken so.
"""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from shardloop.errors import LayoutError
from shardloop.families import CanonicalModel
from shardloop.families.fp8 import with_block_fp8
from shardloop.layout import make_layout
from shardloop.layout.tables import Table
from shardloop.reshard.join import Join
from shardloop.reshard.plan import Plan, plan_reshard
from tests.layout.reference import tiny_model
from tests.reshard.handmade import random_layout, random_model

MOE = {"moe_intermediate_size": 4, "num_hidden_layers": 4, "hidden_size": 7}


def every_model() -> list[CanonicalModel]:
    dense = tiny_model("qwen3", num_attention_heads=8, num_key_value_heads=2, hidden_size=7)
    return [
        dense,
        tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=3),
        tiny_model("qwen3_moe", num_experts=4, **MOE),
        tiny_model("deepseek_v3", **DEEPSEEK),
        with_block_fp8(tiny_model("llama", hidden_size=9, intermediate_size=12), block=4),
    ]


DEEPSEEK = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 3,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "tie_word_embeddings": True,
    **MOE,
}
SPECS = [
    "fsdp=3",
    "dp=2,fsdp=2",
    "fsdp=2,tp=2",
    "tp=2,fsdp=2",
    "zero3=3",
    "zero3=3,tp=2",
    "pp=2,tp=2",
    "pp=2,zero3=2",
    "megatron:pp=2,tp=2",
    "megatron:pp=2,dp=2",
    "megatron:pp=2,ep=2,dp=2",
    "engine:tp=4",
    "engine:tp=2",
    "engine:replicas=2,tp=2",
    "engine:replicas=2,ep=2",
]


ROUTES = [
    ("fsdp=3", "engine:tp=4"),
    ("dp=2,fsdp=2", "engine:replicas=2,tp=2"),
    ("zero3=3,tp=2", "engine:tp=4"),
    ("engine:tp=4", "megatron:pp=2,tp=2"),
]


def make(route: tuple[str, str]) -> Plan:
    model = tiny_model("qwen3", num_attention_heads=8, num_key_value_heads=2, hidden_size=7)
    src, dst = route
    return plan_reshard(make_layout(model, src), make_layout(model, dst))


def random_plans(rng: random.Random, number: int) -> list[Plan]:
    """Plans between random layouts, some written by hand, on the same ranks or on others."""
    plans: list[Plan] = []
    models = every_model()
    while len(plans) < number:
        if rng.random() < 0.3:
            model = random_model(rng)
            layouts = random_layout(model, rng), random_layout(model, rng)
        else:
            model, (src, dst) = models[len(plans) % len(models)], rng.choices(SPECS, k=2)
            try:
                layouts = make_layout(model, src), make_layout(model, dst)
            except LayoutError:
                continue
        shared = {"dst_ranks": range(layouts[1].world_size)} if rng.random() < 0.3 else {}
        plans.append(plan_reshard(*layouts, **shared))
    return plans


def with_join(plan: Plan, flow: int, index: int, step: Join) -> Plan:
    old = plan.flows[flow]
    joins = (*old.joins[:index], step, *old.joins[index + 1 :])
    flows = (*plan.flows[:flow], replace(old, joins=joins), *plan.flows[flow + 1 :])
    return replace(plan, flows=flows)


def changed(array: Any, index: Any, value: Any) -> Any:
    copied = array.copy()
    copied[index] = value
    return copied


PAIR_COLUMNS = ("atom", "row", "lo", "hi", "cell")


def with_pairs(step: Join, index: list[int]) -> Join:
    return replace(step, **{name: getattr(step, name)[index] for name in PAIR_COLUMNS})


def drop_pair(step: Join, rng: random.Random) -> Join | None:
    kept = list(range(len(step.lo)))
    kept.pop(rng.randrange(len(kept)))
    return with_pairs(step, kept)


def double_pair(step: Join, rng: random.Random) -> Join | None:
    pairs = list(range(len(step.lo)))
    return with_pairs(step, [*pairs, rng.choice(pairs)])


def shift_pair(step: Join, rng: random.Random) -> Join | None:
    """A gap and an overlap of equal volume; in the expert's block the wrong experts."""
    at = rng.randrange(len(step.lo)), rng.randrange(step.lo.shape[1])
    by = rng.choice([-1, 1])
    lo, hi = changed(step.lo, at, step.lo[at] + by), changed(step.hi, at, step.hi[at] + by)
    return replace(step, lo=lo, hi=hi)


def shorten_pair(step: Join, rng: random.Random) -> Join | None:
    at = rng.randrange(len(step.lo)), rng.randrange(step.lo.shape[1])
    if rng.random() < 0.5:
        return replace(step, lo=changed(step.lo, at, step.lo[at] + 1))
    return replace(step, hi=changed(step.hi, at, step.hi[at] - 1))


def repeat_another(step: Join, rng: random.Random) -> Join | None:
    """Of two pairs of a row with equal volume one comes twice and one never."""
    i, j = rng.randrange(len(step.lo)), rng.randrange(len(step.lo))
    volume = np.prod(step.hi - step.lo, axis=1)
    if i == j or step.row[i] != step.row[j] or volume[i] != volume[j]:
        return None
    columns = {n: changed(getattr(step, n), j, getattr(step, n)[i]) for n in ("atom", "lo", "hi")}
    return replace(step, **columns)


def swap_atoms(step: Join, rng: random.Random) -> Join | None:
    i, j = rng.randrange(len(step.lo)), rng.randrange(len(step.lo))
    if step.atom[i] == step.atom[j]:
        return None
    return replace(step, atom=changed(step.atom, [i, j], step.atom[[j, i]]))


def swap_rows(step: Join, rng: random.Random) -> Join | None:
    i, j = rng.randrange(len(step.lo)), rng.randrange(len(step.lo))
    if step.row[i] == step.row[j] or step.cell[i] == step.cell[j]:
        return None
    return replace(step, row=changed(step.row, [i, j], step.row[[j, i]]))


def wrong_holder(step: Join, rng: random.Random) -> Join | None:
    if len(step.src.lo) < 2:
        return None
    i = rng.randrange(len(step.holder_row))
    other = (step.holder_row[i] + rng.randrange(1, len(step.src.lo))) % len(step.src.lo)
    if step.src.part[other] == step.src.part[step.holder_row[i]] and step.src.source.any():
        return None  # a rank that has both copies of a tied tensor
    return replace(step, holder_row=changed(step.holder_row, i, other))


def _moved(table: Table, rng: random.Random) -> Table:
    at = rng.randrange(len(table.loc)), rng.randrange(table.loc.shape[1])
    return replace(table, loc=changed(table.loc, at, table.loc[at] + rng.choice([-1, 1, 2])))


def wrong_loc_at_source(step: Join, rng: random.Random) -> Join | None:
    return replace(step, src=_moved(step.src, rng))


def wrong_loc_at_destination(step: Join, rng: random.Random) -> Join | None:
    return replace(step, dst=_moved(step.dst, rng))


def wrong_part(step: Join, rng: random.Random) -> Join | None:
    side = rng.choice(["src", "dst"])
    table = getattr(step, side)
    i = rng.randrange(len(table.part))
    return replace(step, **{side: replace(table, part=changed(table.part, i, table.part[i] + 1))})


def wrong_copy(step: Join, rng: random.Random) -> Join | None:
    """A row of a tied tensor that is said to be another copy's."""
    table = step.src
    i = rng.randrange(len(table.source))
    return replace(step, src=replace(table, source=changed(table.source, i, 1 - table.source[i])))


def wrong_cell(step: Join, rng: random.Random) -> Join | None:
    i = rng.randrange(len(step.cell))
    return replace(step, cell=changed(step.cell, i, step.cell[i] + 1))


def wrong_order(step: Join, rng: random.Random) -> Join | None:
    """The same pairs in another order: both ends count holders and consumers by it."""
    pairs = list(range(len(step.lo)))
    rng.shuffle(pairs)
    return None if pairs == sorted(pairs) else with_pairs(step, pairs)


def any_number_changed(step: Join, rng: random.Random) -> Join:
    """One number, or a row and another exchanged, in a column of the join or of its tables."""
    name = rng.choice(["", "", "src", "dst"])
    part = getattr(step, name) if name else step
    columns = {f.name: getattr(part, f.name) for f in fields(part)}
    column = rng.choice([k for k, v in columns.items() if isinstance(v, np.ndarray) and v.size])
    array = columns[column].copy()
    i, j = rng.randrange(len(array)), rng.randrange(len(array))
    if rng.random() < 0.5:
        array[[i, j]] = array[[j, i]]
    else:
        array.reshape(-1)[rng.randrange(array.size)] += rng.choice([-2, -1, 1, 2])
    part = replace(part, **{column: array})
    return replace(step, **{name: part}) if name else part


WAYS: list[Callable[[Join, random.Random], Join | None]] = [
    drop_pair,
    double_pair,
    shift_pair,
    shorten_pair,
    repeat_another,
    swap_atoms,
    swap_rows,
    wrong_holder,
    wrong_loc_at_source,
    wrong_loc_at_destination,
    wrong_part,
    wrong_copy,
    wrong_cell,
    wrong_order,
]
