"""Layouts that do not fit the model: the fault, the value and what is allowed are named."""

import pytest

from shardloop.errors import LayoutError
from shardloop.families import CanonicalModel
from shardloop.layout import make_layout
from shardloop.parallel.mesh import trainer_axes
from tests.families.configs import moe_config
from tests.layout.reference import tiny_model


def moe_model(model_type: str = "qwen3_moe", **changes: object) -> CanonicalModel:
    return tiny_model(**moe_config(model_type, **changes))


def refusal(model: CanonicalModel, spec: str) -> str:
    with pytest.raises(LayoutError) as error:
        make_layout(model, spec)
    return str(error.value)


@pytest.mark.parametrize("scheme", ["", "megatron:"])
@pytest.mark.parametrize(
    "spec, message",
    [
        ("pp=6", "pp=6 leaves a stage without any of num_layers=5, in chunks of 1; choose pp from"),
        (
            "pp=4",
            "pp=4 leaves a stage without any of num_layers=5, in chunks of 2; choose pp from "
            "1, 2, 3, 5",
        ),
    ],
)
def test_stages_without_layers_are_refused(scheme: str, spec: str, message: str) -> None:
    assert refusal(tiny_model(num_hidden_layers=5), scheme + spec).startswith(message)


def test_chunks_that_do_not_come_out_even_are_refused() -> None:
    model = tiny_model(num_hidden_layers=8)
    message = refusal(model, "megatron:pp=2,vpp=3")
    assert message == "pp=2 x vpp=3 does not divide num_layers=8; choose vpp from 1, 2, 4"
    message = refusal(model, "megatron:pp=3,vpp=2")
    assert message == "pp=3 x vpp=2 does not divide num_layers=8; leave vpp out"


@pytest.mark.parametrize(
    "spec, message",
    [
        ("fsdp=8,ep=8", "ep=8 is more than the 4 experts; choose ep up to 4"),
        ("engine:ep=3", "ep=3 does not divide num_experts=4; choose ep from 1, 2, 4"),
        ("megatron:ep=3", "ep=3 does not divide num_experts=4; choose ep from 1, 2, 4"),
        (
            "fsdp=3,ep=2",
            "layout fsdp=3,ep=2: experts are on 2 ranks (ep=2 x etp=1), dense tensors on 3 "
            "(fsdp=3); choose sizes of which one divides the other",
        ),
        ("ep=2,etp=4", "etp=4 does not divide moe_intermediate_size=6; choose etp from 1, 2, 3, 6"),
        ("fsdp=2,dp=2,ep=2", "layout fsdp=2,dp=2,ep=2: dp stands between axes that share ranks"),
    ],
)
def test_experts_that_cannot_be_shared_so_are_refused(spec: str, message: str) -> None:
    assert refusal(moe_model(), spec).startswith(message)


def test_expert_axes_of_a_dense_model_are_refused() -> None:
    message = refusal(tiny_model(), "fsdp=2,ep=2,etp=1")
    assert message == "model llama has no experts; leave ep and etp out"


def test_every_fault_is_named() -> None:
    message = refusal(moe_model(), "pp=3,tp=3,ep=6,etp=4")
    for fault in (
        "tp=3 does not divide num_heads=4",
        "num_kv_heads=2; choose tp from 1, 2",
        "etp=4 does not divide",
        "pp=3 leaves a stage without any of num_layers=2",
        "ep=6 is more than the 4 experts",
    ):
        assert fault in message


def test_latent_heads_are_not_cut() -> None:
    message = refusal(moe_model("deepseek_v3"), "tp=8")
    assert message.startswith("tp=8 does not divide num_heads=4, tp=8 does not divide moe_inter")
    assert message.count("num_heads") == 1


def test_more_megatron_ranks_than_rows_of_qkv_is_refused() -> None:
    model = tiny_model(
        num_attention_heads=8, num_key_value_heads=1, head_dim=1, intermediate_size=8
    )
    message = refusal(model, "megatron:tp=4")
    assert message.startswith("tp=4 does not divide the 10 rows of linear_qkv")
    make_layout(model, "engine:tp=4")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp=65536,fsdp=65536", "has 4294967296 ranks; choose at most 65536"),
        ("zero3=16384,tp=2", "has 32768 ranks; choose at most 16384"),
    ],
)
def test_too_many_ranks_are_refused(spec: str, message: str) -> None:
    assert message in refusal(tiny_model(), spec)


def test_sizes_to_choose_from_are_no_more_than_ranks_there_can_be() -> None:
    model = tiny_model(intermediate_size=2**31 - 1, hidden_size=4, head_dim=2)
    assert refusal(model, "tp=2").endswith("choose tp from 1")
    model = moe_model(num_experts=2**31 - 1)
    assert refusal(model, "engine:ep=2").endswith("choose ep from 1")


@pytest.mark.parametrize(
    "spec", ["pp=2,fsdp=2", "zero3=2", "fsdp=2,ep=2", "megatron:tp=2", "engine:tp=2"]
)
def test_layouts_that_no_trainer_here_runs_are_refused_before_a_run(spec: str) -> None:
    with pytest.raises(LayoutError, match=r"is not a training layout; name some of dp=R .*fsdp=F"):
        trainer_axes(spec)
