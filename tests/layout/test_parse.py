"""The grammar of layout strings: what it reads, and what it refuses by name."""

import pytest

from shardloop.errors import LayoutError
from shardloop.layout import parse_layout


@pytest.mark.parametrize(
    "text, shortest",
    [
        ("fsdp=8", "fsdp=8"),
        ("hf:fsdp=2,tp=4", "fsdp=2,tp=4"),
        (" dp=2 , fsdp=3 ", "dp=2,fsdp=3"),
        ("engine:replicas=4,tp=8", "engine:replicas=4,tp=8"),
        ("engine:tp=1", "engine:tp=1"),
    ],
)
def test_layout_string_round_trips(text: str, shortest: str) -> None:
    spec = parse_layout(text)
    assert str(spec) == shortest
    assert parse_layout(str(spec)) == spec


def test_axes_keep_their_order() -> None:
    assert parse_layout("tp=4,dp=2,fsdp=3").axes == (("tp", 4), ("dp", 2), ("fsdp", 3))
    assert parse_layout("tp=4").size("fsdp") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "'' is not axis=size; write for example tp=2, with axes of hf from dp, fsdp, tp"),
        ("fsdp", "'fsdp' is not axis=size"),
        ("tp=2,", "'' is not axis=size"),
        ("megatron:tp=2", "unknown scheme 'megatron'; choose from hf, engine"),
        (":tp=2", "unknown scheme ''; choose from hf, engine"),
        ("pp=2", "a training layout has no axis 'pp'; choose from dp, fsdp, tp"),
        ("engine:fsdp=2", "an engine layout has no axis 'fsdp'; choose from replicas, tp"),
        ("fsdp=0", "fsdp=0; choose a whole number >= 1"),
        ("fsdp=-2", "fsdp=-2; choose a whole number >= 1"),
        ("fsdp=two", "fsdp=two; choose a whole number >= 1"),
        ("fsdp=2.0", "fsdp=2.0; choose a whole number >= 1"),
        ("tp=2,fsdp=2,tp=2", "axis 'tp' is named twice; name each axis once"),
    ],
)
def test_a_wrong_layout_string_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)
