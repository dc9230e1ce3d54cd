"""The dense Qwen3 family as a table: q and k are normed per head. Read by `shardloop.families`.

Floor 1.
"""

from shardloop.families.rows import ATTENTION, LAYER_NORMS, QK_NORMS, gated_mlp
from shardloop.families.table import Family

QWEN3 = Family(
    model_type="qwen3",
    head_dim=128,
    rows=(
        *ATTENTION,
        *QK_NORMS,
        *gated_mlp("mlp", "intermediate"),
        *LAYER_NORMS,
    ),
)
