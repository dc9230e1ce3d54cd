"""The grammar of layout strings: what it reads, and what it refuses by name."""

import re

import pytest

from shardloop.errors import LayoutError
from shardloop.layout import parse_layout
from shardloop.layout.parse import AXES


@pytest.mark.parametrize(
    "text, shortest",
    [
        ("fsdp=8", "fsdp=8"),
        ("hf:fsdp=2,tp=4", "fsdp=2,tp=4"),
        (" dp=2 , fsdp=3 ", "dp=2,fsdp=3"),
        ("engine:replicas=4,tp=8", "engine:replicas=4,tp=8"),
        ("engine:tp=1", "engine:tp=1"),
        ("zero3=4,tp=2", "zero3=4,tp=2"),
        ("hf:pp=4,dp=2,tp=2,ep=4", "pp=4,dp=2,tp=2,ep=4"),
        ("megatron:pp=16,ep=64,dp=2", "megatron:pp=16,ep=64,dp=2"),
        ("megatron: pp=2, vpp=3", "megatron:pp=2,vpp=3"),
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
        ("", "'' is not axis=size; write for example fsdp=2, with axes of hf from pp, dp, fsdp"),
        ("fsdp", "'fsdp' is not axis=size"),
        ("tp=2,", "'' is not axis=size"),
        ("fdsp", "'fdsp' is not axis=size (do you mean fsdp?)"),
        ("zero3=16385", "zero3=16385; choose a whole number from 1 to 16384"),
        ("megatro:tp=2", "unknown scheme 'megatro' (do you mean megatron?); choose from hf, "),
        ("x:tp=2", "unknown scheme 'x'; choose from hf, megatron, engine"),
        (":tp=2", "unknown scheme ''; choose from hf, megatron, engine"),
        ("vpp=2", "a training layout has no axis 'vpp' (do you mean pp?); choose from pp, dp"),
        ("fdsp=2", "has no axis 'fdsp' (do you mean fsdp?)"),
        ("engine:fsdp=2", "an engine layout has no axis 'fsdp'; choose from replicas, tp, ep"),
        ("megatron:replicas=2", "a Megatron layout has no axis 'replicas'; choose from pp, vpp"),
        ("fsdp=0", "fsdp=0; choose a whole number from 1 to 65536"),
        ("fsdp=-2", "fsdp=-2; choose a whole number"),
        ("fsdp=two", "fsdp=two; choose a whole number"),
        ("fsdp=2.0", "fsdp=2.0; choose a whole number"),
        ("fsdp=\N{SUPERSCRIPT TWO}", "choose a whole number"),
        ("fsdp=65537", "fsdp=65537; choose a whole number from 1 to 65536"),
        ("fsdp=" + "9" * 5000, "choose a whole number from 1 to 65536"),
        ("tp=2,fsdp=2,tp=2", "axis 'tp' is named twice; name each axis once"),
        ("fsdp=2,zero3=2", "fsdp and zero3 both cut what tp leaves; choose one of them"),
        ("megatron:vpp=2", "vpp without pp; name the stages too"),
        ("tp=0,pq=2", "tp=0; choose a whole number from 1 to 65536; a training layout has no"),
    ],
)
def test_a_wrong_layout_string_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("scheme", AXES)
@pytest.mark.parametrize("text", ["{}", " {} ", "{}:", "{}=2", "{},tp=2", "hf:{}"])
def test_a_scheme_without_axes_is_answered_with_its_own(scheme: str, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text.format(scheme))
    told = re.search(r"write for example (\S+), with axes of (\w+) from (.*)$", str(error.value))
    assert told is not None, error.value
    example, named, axes = told.groups()
    assert (named, axes) == (scheme, ", ".join(AXES[scheme]))
    assert parse_layout(example).scheme == scheme
