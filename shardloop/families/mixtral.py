"""The Mixtral family as a table: w1 is the gate, w3 up, w2 down. Read by `shardloop.families`.

Floor 1.
"""

from shardloop.families.rows import LAYER_NORMS
from shardloop.families.table import Family, Row, Size

MIXTRAL = Family(
    model_type="mixtral",
    sizes={
        "experts": Size("num_local_experts"),
        "expert_intermediate": Size("intermediate_size"),
    },
    rows=(
        Row("self_attn.q_proj.weight", "q hidden"),
        Row("self_attn.k_proj.weight", "kv hidden"),
        Row("self_attn.v_proj.weight", "kv hidden"),
        Row("self_attn.o_proj.weight", "hidden q"),
        Row("block_sparse_moe.gate.weight", "experts hidden"),
        Row("block_sparse_moe.experts.{expert}.w1.weight", "expert_intermediate hidden"),
        Row("block_sparse_moe.experts.{expert}.w2.weight", "hidden expert_intermediate"),
        Row("block_sparse_moe.experts.{expert}.w3.weight", "expert_intermediate hidden"),
        *LAYER_NORMS,
    ),
)
