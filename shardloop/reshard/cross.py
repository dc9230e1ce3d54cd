"""Products of tables, and the tables of copies as one. Called by `reshard.plan`. Floor 1.

Ranks add and boxes multiply: a row of the product has the sum of the rows' parts and the product of
their boxes.
"""

from functools import lru_cache

import numpy as np

from shardloop.layout.strips import Ints
from shardloop.layout.tables import MOST_KEPT, Table


@lru_cache(maxsize=MOST_KEPT)
def cross(tables: tuple[Table, ...]) -> Table:
    """The product of the tables of successive cuts, by part; equal tables give the same object."""
    if len(tables) == 1:
        return tables[0]
    rows = np.indices([len(table.part) for table in tables]).reshape(len(tables), -1)
    chosen = list(zip(tables, rows, strict=True))
    return _by_part(
        sum((table.part[row] for table, row in chosen), np.array(0)),
        np.concatenate([table.lo[row] for table, row in chosen], axis=1),
        np.concatenate([table.hi[row] for table, row in chosen], axis=1),
        np.concatenate([table.loc[row] for table, row in chosen], axis=1),
        sum((table.source[row] for table, row in chosen), np.array(0)),
    )


@lru_cache(maxsize=MOST_KEPT)
def of_copies(tables: tuple[Table, ...]) -> Table:
    """The rows of all copies, each with the index of its table as source."""
    if len(tables) == 1:
        return tables[0]
    return _by_part(
        np.concatenate([table.part for table in tables]),
        np.concatenate([table.lo for table in tables]),
        np.concatenate([table.hi for table in tables]),
        np.concatenate([table.loc for table in tables]),
        np.repeat(np.arange(len(tables)), [len(table.part) for table in tables]),
    )


def _by_part(part: Ints, lo: Ints, hi: Ints, loc: Ints, source: Ints) -> Table:
    order = np.argsort(part, kind="stable")
    return Table(part[order], lo[order], hi[order], loc[order], source[order])
