"""The Qwen3-MoE family as a table: Qwen3 with routed experts. Read by `shardloop.families`.

Every layer has experts: configs that mix in dense layers are refused. Floor 1.
"""

from shardloop.families.rows import ATTENTION, LAYER_NORMS, QK_NORMS, gated_mlp
from shardloop.families.table import Family, Row

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    only={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    rows=(
        *ATTENTION,
        *QK_NORMS,
        Row("mlp.gate.weight", "experts hidden"),
        *gated_mlp("mlp.experts.{expert}", "expert_intermediate"),
        *LAYER_NORMS,
    ),
)
