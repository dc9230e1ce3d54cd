"""Ranks of a Megatron-Core model, built one after the other, with the weights mbridge gives them.

Megatron asks its process groups for sizes and ranks only while it builds a model, so groups that
move nothing are enough. Without Transformer Engine it builds the plain layer spec, whose norms and
experts have other names; `_known_as` says which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.groups import idle_groups

PLAIN = {
    "use_cpu_initialization": True,
    "moe_token_dispatcher_type": "allgather",  # the others ask for a CUDA stream
    "moe_shared_expert_overlap": False,
    **dict.fromkeys(
        (
            "variable_seq_lengths",
            "sequence_parallel",
            "moe_grouped_gemm",
            "masked_softmax_fusion",
            "persist_layer_norm",
            "gradient_accumulation_fusion",
            "bias_activation_fusion",
            "bias_dropout_fusion",
        ),
        False,
    ),
}
"""What of mbridge's settings needs a GPU or Transformer Engine; no shape depends on them."""


class Megatron:
    """One rank of one layout: mbridge's converter, and Megatron's chunks of the model."""

    def __init__(self, bridge: Any, chunks: list[Any]) -> None:
        self._bridge, self._chunks = bridge, chunks
        self._before = [sum(len(c.decoder.layers) for c in chunks[:v]) for v in range(len(chunks))]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Local name -> shape; names of a later chunk go on where those of the one before end."""
        return {name: tuple(param.shape) for name, _, _, param in self._params()}

    def weights(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank has of the Hugging Face weights `full`."""
        return {name: self._weight(there, p, full) for name, _, there, p in self._params()}

    def back(self, tp_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The Hugging Face weights that the local tensors of all tensor-parallel ranks make."""
        made: dict[str, Tensor] = {}
        for name, here, there, param in self._params():
            parts = [local[name] for local in tp_ranks]
            whole = parts[0]
            if getattr(param, "tensor_model_parallel", False):
                whole = self._bridge._weight_merge_across_tp(here, parts, param)
            made.update(zip(*self._bridge._weight_to_hf_format(there, whole), strict=True))
        return made

    def _weight(self, name: str, param: Tensor, full: Mapping[str, Tensor]) -> Tensor:
        given = [full[hf_name] for hf_name in self._bridge._weight_name_mapping_mcore_to_hf(name)]
        whole = self._bridge._weight_to_mcore_format(name, given)
        mpu = self._bridge.mpu
        is_expert = ".mlp.experts.linear_fc" in name
        size, rank = (mpu.etp_size, mpu.etp_rank) if is_expert else (mpu.tp_size, mpu.tp_rank)
        part: Tensor = self._bridge._weight_split_across_tp(name, whole, param, size)[rank]
        return part

    def _params(self) -> Iterator[tuple[str, str, str, Tensor]]:
        """Name on the rank, in its chunk and in the whole model, and the parameter."""
        for chunk, before in zip(self._chunks, self._before, strict=True):
            params = chunk.state_dict(keep_vars=True)
            known = {
                _known_as(name, params): p for name, p in params.items() if "_extra" not in name
            }
            named = SimpleNamespace(decoder=chunk.decoder, state_dict=lambda known=known: known)
            of_model = self._bridge._weight_name_mapping_mcore_local_to_global(named)
            for name, param in known.items():
                yield _numbered_from(name, before), name, of_model[name], param


@contextmanager
def megatron_rank(
    config: Mapping[str, Any], rank: int, *, world_size: int, axes: Mapping[str, int]
) -> Iterator[Megatron]:
    """The model of `config` as rank `rank` has it; `axes` from pp, vpp, tp, ep, etp."""
    pytest.importorskip("megatron.core")
    mbridge = pytest.importorskip("mbridge")
    from mbridge.core.bridge import _MODEL_REGISTRY
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import multi_latent_attention
    from transformers import AutoConfig

    tp, vpp = axes.get("tp", 1), axes.get("vpp")
    hf_config = AutoConfig.for_model(**config)
    hf_config.rope_theta = 10000.0  # where mbridge looks for it
    kind = _MODEL_REGISTRY[config["model_type"]]
    with pytest.MonkeyPatch.context() as patch, idle_groups(rank, world_size):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=axes.get("pp", 1),
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=axes.get("ep", 1),
            expert_tensor_parallel_size=axes.get("etp"),
            create_gloo_process_groups=False,
        )
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(Tensor, "cuda", lambda tensor: tensor)
        patch.setattr(multi_latent_attention, "TELinear", EngineLinear)
        patch.setattr(LanguageModule, "_set_attention_backend", lambda _: None)  # environment
        # one tied model would change it for all models to come
        patch.setattr(kind, "_DIRECT_MAPPING", dict(kind._DIRECT_MAPPING))
        patch.setattr(kind, "TransformerConfigClass", staticmethod(_settings(kind)))
        try:
            bridge = mbridge.AutoBridge.from_config(
                hf_config, dtype=torch.float32, make_vocab_size_divisible_by=128 * tp
            )
            bridge.set_extra_args(**PLAIN)
            bridge.has_vp_stage = True
            bridge.vocab_size = bridge.padded_vocab_size = hf_config.vocab_size  # until it pads
            bridge._get_transformer_layer_spec = lambda stage: _plain_spec(bridge.config, stage)
            provide = bridge._model_provider([])
            yield Megatron(bridge, [_chunk(provide, stage) for stage in _stages(vpp)])
        finally:
            parallel_state.destroy_model_parallel()


def _settings(kind: Any) -> Callable[..., Any]:
    """Megatron's settings, but for one that mbridge still gives and Megatron has renamed."""
    made_by = kind.TransformerConfigClass

    def make(**settings: Any) -> Any:
        settings.pop("max_position_embeddings", None)
        return made_by(**settings)

    return make


def _plain_spec(config: Any, stage: int | None) -> Any:
    """The layers of a chunk, without what attends: it has no weights, and no plain one fits MLA.

    What makes latents is Transformer Engine's linear layer, as in the specs that use it.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = IdentityOp
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                setattr(attention, name, EngineLinear)
    return block


class EngineLinear(torch.nn.Module):
    """Stands in for Transformer Engine's linear layer, which Megatron asks to be `duplicated`."""

    def __init__(self, num_in: int, num_out: int, *, parallel_mode: str, **_: Any) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(torch.empty(num_out, num_in))


def _chunk(provide: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state

    ends = {"ignore_virtual": False, "vp_stage": stage}
    return provide(
        parallel_state.is_pipeline_first_stage(**ends),
        parallel_state.is_pipeline_last_stage(**ends),
        stage,
    )


def _stages(vpp: int | None) -> list[int | None]:
    return [None] if vpp is None else list(range(vpp))


def _known_as(name: str, params: Mapping[str, Any]) -> str:
    """The name that a tensor of the plain layer spec has under Transformer Engine's."""
    head, _, rest = name.partition("local_experts.")
    if rest:
        expert, _, rest = rest.partition(".")
        return f"{head}{rest}{expert}"
    layer = name[: name.index(".", len("decoder.layers."))] if ".layers." in name else ""
    is_latent = f"{layer}.self_attention.linear_kv_up_proj.weight" in params
    is_dense = f"{layer}.mlp.linear_fc1.weight" in params
    fused = {
        f"{layer}.self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        f"{layer}.pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_" if is_dense else "",
        f"{layer}.input_layernorm.": "" if is_latent else "self_attention.linear_qkv.layer_norm_",
    }
    if is_latent:
        q_norm = f"{layer}.self_attention.q_layernorm."
        fused[q_norm] = "self_attention.linear_q_up_proj.layer_norm_"
    for start, instead in fused.items():
        if layer and instead and name.startswith(start):
            return f"{layer}.{instead}{name.removeprefix(start)}"
    return name


def _numbered_from(name: str, before: int) -> str:
    head, _, rest = name.partition("decoder.layers.")
    if head or not rest:
        return name
    layer, _, rest = rest.partition(".")
    return f"decoder.layers.{int(layer) + before}.{rest}"
