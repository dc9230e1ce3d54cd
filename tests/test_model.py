"""Our decoder against transformers, against itself cut into ranks, and its refusals."""

import pytest
import torch
from torch import Tensor

from shardloop import hf
from shardloop.errors import ModelError
from shardloop.families import canonical_model
from shardloop.layout import box_of, make_layout
from shardloop.model import Decoder, DecoderConfig, PromptAttention, SingleProcess, TensorParallel
from tests.engines.models import (
    KINDS,
    LLAMA3_ROPE,
    VOCAB,
    model_folder,
    run_threads,
    transformers_model,
    weights_of,
)


def config_of(kind: str) -> dict:
    return hf.load_config(model_folder(kind))


def load(kind: str, *, tp: TensorParallel, dtype: torch.dtype = torch.float64) -> Decoder:
    """Our decoder with the weights of `transformers_model(kind)`."""
    config = config_of(kind)
    decoder = Decoder(DecoderConfig.from_hf(config), tp=tp, dtype=dtype)
    layout = make_layout(canonical_model(config), f"engine:tp={tp.size}")
    weights, local = weights_of(kind), decoder.tensors()
    for piece in layout.pieces(tp.rank):
        source = box_of(weights[piece.name], piece.box)
        piece.of(local).copy_(source)
    return decoder


def logits_of(decoder: Decoder, ids_BT: Tensor) -> Tensor:
    num_rows, num_tokens = ids_BT.shape
    hidden = decoder(
        ids_BT,
        positions_BT=torch.arange(num_tokens).expand(num_rows, -1),
        num_positions=num_tokens,
        history=PromptAttention(),
    )
    return decoder.logits(hidden)


def random_ids(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (3, 50), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_in_float64(kind, seed):
    ids = random_ids(seed)
    with torch.no_grad():
        expected = transformers_model(kind)(ids).logits
    torch.testing.assert_close(
        logits_of(load(kind, tp=SingleProcess()), ids), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_float32_stays_within_its_bound(kind, seed):
    ids = random_ids(seed)
    with torch.no_grad():
        expected = transformers_model(kind)(ids).logits.log_softmax(-1)
    ours = logits_of(load(kind, tp=SingleProcess(), dtype=torch.float32), ids).log_softmax(-1)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_do_not_depend_on_the_number_of_ranks(kind, size, seed):
    # 37 ids do not divide by 2 or 4 (padding), and 2 kv heads are replicated on 4 ranks.
    ids = random_ids(seed)
    whole = logits_of(load(kind, tp=SingleProcess()), ids)
    for cut in run_threads(lambda comm: logits_of(load(kind, tp=comm), ids), size):
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def test_padding_of_the_vocabulary_never_reaches_the_logits(seed):
    ids = random_ids(seed)
    whole = logits_of(load("llama", tp=SingleProcess()), ids)

    def with_loud_padding(comm: TensorParallel) -> Tensor:
        decoder = load("llama", tp=comm)
        if comm.rank == comm.size - 1:
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                padding = decoder.tensors()[name][-3:]
                assert not padding.any(), "40 rows for 37 ids: the last three are padding"
                padding.fill_(1e9)
        return logits_of(decoder, ids)

    for cut in run_threads(with_loud_padding, 4):
        assert cut.shape[-1] == VOCAB
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def test_a_tied_head_follows_its_embedding(seed):
    ids = random_ids(seed)
    decoder, model = load("llama-tied", tp=SingleProcess()), transformers_model("llama-tied")
    assert "lm_head.weight" not in decoder.tensors()
    decoder.tensors()["model.embed_tokens.weight"].mul_(1.5)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
        expected = model(ids).logits
    torch.testing.assert_close(logits_of(decoder, ids), expected, rtol=0, atol=1e-12)


def test_a_padded_row_scores_like_the_row_alone(seed):
    decoder, ids = load("qwen3", tp=SingleProcess()), random_ids(seed)
    alone = logits_of(decoder, ids[:1, :20])
    padded = ids.clone()
    padded[0, 20:] = 0
    torch.testing.assert_close(logits_of(decoder, padded)[:1, :20], alone, rtol=0, atol=1e-12)


def test_old_and_new_spelling_of_rope_settings_are_one():
    config = config_of("llama3-rope")
    assert config["rope_parameters"] == LLAMA3_ROPE
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old |= {"rope_theta": 500.0, "rope_scaling": scaling}
    assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(config)
    plain = {**config_of("llama"), "rope_parameters": None, "rope_theta": 77.0}
    assert DecoderConfig.from_hf(plain).rope == {"rope_type": "default", "rope_theta": 77.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; choose silu"),
        ({"hidden_act": None}, "hidden_act=None"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"use_sliding_window": "no"}, "use_sliding_window='no'; it must be true or false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types=.* for each of 2 layers"),
        ({"layer_types": 2}, "layer_types=2 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"attention_bias": True}, "biases of k_proj, o_proj"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_parameters": []}, r"config.json: rope_parameters=\[\]; it must be an object"),
        ({"rope_parameters": "x"}, "rope_parameters='x'; it must be an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "scaling: type='linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention={.*one set"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters: rope_theta=0; .* above 0"),
        ({"rope_parameters": {"rope_theta": -1e4}}, "rope_theta=-10000.0; .* above 0"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta='1e4'; it must be a finite num"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters has no low_freq_factor"),
        (
            {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1}},
            "high_freq_factor=1; it must be above low_freq_factor=1",
        ),
        ({"rope_parameters": LLAMA3_ROPE | {"factor": float("nan")}}, "factor=nan"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor=0.5"),
        ({"rms_norm_eps": None}, "no rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'; it must be a finite number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"max_position_embeddings": None}, "no max_position_embeddings"),
        ({"max_position_embeddings": "128"}, "max_position_embeddings='128'; it must be a whole"),
        ({"max_position_embeddings": 128.0}, "max_position_embeddings=128.0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"max_position_embeddings": 10**12}, "whole number from 1 to 2147483647"),
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
    ],
)
def test_settings_that_would_change_the_result_are_refused_by_name(change, named):
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_hf(config_of("llama") | change)


def test_weights_that_no_one_wrote_show_in_the_logits(seed):
    decoder = load("qwen3", tp=SingleProcess())
    fresh = Decoder(decoder.config, tp=SingleProcess(), dtype=torch.float64).tensors()
    assert all(tensor.isnan().all() for tensor in fresh.values())
    name = "model.layers.1.mlp.down_proj.weight"
    decoder.tensors()[name][3, 4] = fresh[name][3, 4]
    assert logits_of(decoder, random_ids(seed)).isnan().all()
