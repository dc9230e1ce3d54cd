"""Settings are checked when they are made, from Python as from the command line."""

import json
import math
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from shardloop import config
from shardloop.config import (
    EngineConfig,
    EvalConfig,
    GRPOConfig,
    OptimConfig,
    SamplingConfig,
    TrainConfig,
    TrainerConfig,
    WorkersConfig,
    from_dict,
    to_dict,
)
from shardloop.errors import UsageError
from shardloop.presets import PRESETS
from shardloop.types import Sampling

CONFIGS = [
    kind
    for name, kind in vars(config).items()
    if is_dataclass(kind) and isinstance(kind, type) and name.endswith("Config")
]
FIELDS = [(kind, field.name) for kind in CONFIGS for field in fields(kind)]
OTHER_KINDS: dict[Any, list[Any]] = {
    int: [2.5, True, "3", None, math.nan],
    float: ["1.0", True, None, math.nan, math.inf, -1.0],
    str: [3, None, b"fsdp=1"],
    bool: [1, "no", None],
    tuple[str, ...]: ["text", ["a"], 3, ("a", 3), ("",)],
    float | None: ["1.0", True, math.nan, math.inf],
}


@pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_no_field_takes_a_value_of_another_kind(kind: type, name: str) -> None:
    hint = get_type_hints(kind)[name]
    others = ["absent", 3] if get_origin(hint) is Literal else OTHER_KINDS.get(hint, [3])
    for value in others:
        with pytest.raises(UsageError, match=rf"^\S*{name.replace('_', '-')}=.*; "):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_counts_have_an_end(kind: type, name: str) -> None:
    if get_type_hints(kind)[name] is not int:
        return
    for value in (-1, 2**31, 10**21):
        with pytest.raises(UsageError, match=f"{name.replace('_', '-')}={value}; "):
            kind(**{name: value})


def test_every_choice_is_one_of_those_declared() -> None:
    with pytest.raises(UsageError, match="std='x'; choose sample or population or none"):
        GRPOConfig(std="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="correction='mean'; choose none or token or seq"):
        GRPOConfig(correction="mean")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"compute-dtype='float16'; choose float32 or .* or None"):
        TrainerConfig(compute_dtype="float16")  # type: ignore[arg-type]
    for kind in (std for std in get_args(config.Std)):
        assert GRPOConfig(std=kind).std == kind


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SamplingConfig, {"temperature": 1e-46}, "temperature=1e-46; .* of 1e-06 or more"),
        (SamplingConfig, {"top_p": 2.0}, r"top-p=2.0; choose a value in \(0, 1\]"),
        (GRPOConfig, {"samples_per_prompt": 1}, "a group of one has no advantage"),
        (
            GRPOConfig,
            {"prompts_per_step": 10**5, "samples_per_prompt": 10**5},
            "x grpo.samples-per-prompt=10000000000; choose at most 1000000",
        ),
        (OptimConfig, {"lr": 1e38}, r"optim.lr=1e\+38; choose a value from 0 to 100"),
        (SamplingConfig, {"min_p": 1.0}, r"min-p=1.0; choose a value in \[0, 1\)"),
        (EvalConfig, {"prompts": 10**6}, "eval.prompts=1000000; choose a value from 1 to 100000"),
        (EngineConfig, {"max_slots": 0}, "engine.max-slots=0; choose a value from 1 to 100000"),
        (TrainerConfig, {"row_tokens": 2**21}, "trainer.row-tokens=2097152"),
        (WorkersConfig, {"threads": 10**11}, "threads=100000000000; choose a value from 1 to 1024"),
        (WorkersConfig, {"timeout_s": 1e308}, r"timeout-s=1e\+308; .* from 0 to 10000000"),
        (WorkersConfig, {"timeout_s": 0.0}, "timeout-s=0.0; choose a finite value above 0"),
    ],
)
def test_a_value_out_of_range_is_named(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind(**values)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (GRPOConfig, {"dual_clip": 3.0, "loss": "gspo"}, "dual-clip=3.0; .* grpo.loss=ppo only"),
        (GRPOConfig, {"dual_clip": 1.0}, "dual-clip=1.0; choose a finite value above 1"),
        (GRPOConfig, {"aggregation_constant": 9}, "aggregation-constant=9; .* sequence-sum only"),
        (GRPOConfig, {"std": "none", "advantage": "rloo"}, "std=none; .* grpo.advantage=grpo only"),
        (GRPOConfig, {"correction_floor": 0.5}, "correction-floor=0.5; .*-mode=mask only"),
        (
            GRPOConfig,
            {"correction": "none", "correction_mode": "mask"},
            "correction-mode=mask; .* with a grpo.correction only",
        ),
        (
            GRPOConfig,
            {"correction": "none", "correction_cap": 3.0},
            "correction-cap=3.0; .* with a grpo.correction only",
        ),
        (GRPOConfig, {"kl_in": "reward"}, "kl-in=reward; .* with a grpo.kl-coef above 0 only"),
        (GRPOConfig, {"kl_estimator": "k3"}, "kl-estimator=k3; .* with a grpo.kl-coef above 0"),
        (GRPOConfig, {"overlong": "penalty"}, "overlong-buffer=0; give it with .*=penalty"),
        (GRPOConfig, {"overlong_buffer": 4}, "overlong-buffer=4; give it with .*=penalty"),
        (
            TrainerConfig,
            {"dtype": "float64", "compute_dtype": "bfloat16"},
            "compute-dtype=bfloat16; with trainer.dtype=float64 leave it out",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(
    kind: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kind(**values)


def test_the_kl_term_is_one_that_pulls_towards_the_reference_by_default() -> None:
    assert GRPOConfig().kl_kind == "k3"
    assert GRPOConfig(kl_coef=0.1, kl_in="reward").kl_kind == "k1"
    assert GRPOConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k2").kl_kind == "k2"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a/b/../..", "a\\b", "a\0b", "a\n", "x" * 300]
)
def test_the_name_of_a_run_is_one_folder(name: str) -> None:
    with pytest.raises(UsageError, match=r"^name=.*choose one folder name"):
        TrainConfig(name=name)
    assert TrainConfig(name="größe 1").name == "größe 1"


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_come_back_from_json_data(preset: str) -> None:
    config = replace(PRESETS[preset], sampling=SamplingConfig(stop=("\n", "###")))
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5; choose a whole number from 1"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": 0}, "max_tokens=0"),
        (
            {"top_k": 2**64},
            "top_k=18446744073709551616; choose a whole number from 0 to 2147483647",
        ),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": math.nan}, "top_p=nan"),
        (
            {"temperature": 1e-46},
            r"temperature=1e-46; choose 0 \(greedy\) or a finite value of 1e-06",
        ),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"stop_token_ids": (1, "2")}, "stop_token_ids='2'"),
    ],
)
def test_sampling_that_no_engine_can_do_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**{"max_tokens": 4} | values)
