"""`shardloop reshard`: what it prints and writes is the plan; what is wrong is named."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardloop.cli.main import main
from shardloop.cli.reshard import facts
from shardloop.cli.reshard.facts import BUCKET_BYTES, spans
from shardloop.cli.reshard.options import Options, asked, ranks_of
from shardloop.cli.reshard.request import make
from shardloop.reshard.cost import bytes_text
from tests.repo.source import ROOT

SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
QWEN = ("--model", "qwen3-0.6b")
SMALL_PAIR = ("--src", "fsdp=2,tp=2", "--dst", "engine:replicas=2,tp=4")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["reshard", *map(str, arguments)])
        except SystemExit as exit_:  # the option parser's way out
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def saved(run, small: Path, tmp_path: Path) -> Path:
    """A plan on disk, with the transfers of one rank."""
    path = tmp_path / "plan.json"
    assert run("plan", "--model", small, *SMALL_PAIR, "--rank", 5, "--json", path)[0] == 0
    return path


def test_bytes_of_the_ranks_add_up_to_the_wire(run, small: Path) -> None:
    code, out, _ = run("plan", "--model", small, *SMALL_PAIR, "--json", "-")
    assert code == 0
    traffic = json.loads(out)["traffic"]
    sent, received = Counter[int](), Counter[int]()
    for src, dst, num_bytes in traffic["pair_bytes"]:
        sent[src] += num_bytes
        received[dst] += num_bytes
    assert dict(sent) == dict(traffic["send_bytes"])
    assert dict(received) == dict(traffic["receive_bytes"])
    assert sent.total() == traffic["wire_bytes"] == traffic["minimum_bytes"]


@pytest.mark.parametrize("options", [(), ("--fp8",)])
def test_transfers_of_all_ranks_are_the_traffic(run, small: Path, options) -> None:
    pairs = Counter[tuple[int, int]]()
    for rank in range(8):
        arguments = ("--src", "fsdp=8", "--dst", "engine:tp=4,replicas=2", "--colocate", *options)
        _, out, _ = run("plan", "--model", small, *arguments, "--rank", rank, "--json", "-")
        told = json.loads(out)
        for way in ("sends", "receives"):
            by_transfer = sum(t["num_bytes"] for t in told["transfers"][way])
            assert by_transfer == sum(kind["num_bytes"] for kind in told["rank"][way])
        for t in told["transfers"]["receives"]:
            pairs[t["src_rank"], t["dst_rank"]] += t["num_bytes"]
    traffic = told["traffic"]
    wire = {(src, dst): n for (src, dst), n in pairs.items() if src != dst}
    assert wire == {(src, dst): n for src, dst, n in traffic["pair_bytes"]}
    assert pairs.total() == traffic["wire_bytes"] + traffic["local_bytes"]


def test_table_shows_every_pair_and_the_proof(run) -> None:
    arguments = (*QWEN, "--src", "fsdp=3", "--dst", "engine:tp=2")
    code, out, err = run("plan", *arguments)
    assert (code, err) == (0, "")
    told = json.loads(run("plan", *arguments, "--json", "-")[1])
    cells = {(src, dst): bytes_text(n) for src, dst, n in told["traffic"]["pair_bytes"]}
    rows = [
        [cell.strip() for cell in re.split(r"\s{2,}", line.strip())] for line in out.split("\n")
    ]
    sums = [bytes_text(n) for _, n in told["traffic"]["send_bytes"]]
    for src in range(3):
        assert [str(src), cells[src, 3], cells[src, 4], sums[src]] in rows
    assert told["proof"]["text"] in out
    assert "596,049,920 elements, 1.19 GB" in out and "ratio 1.000" in out


def test_many_ranks_are_summarised(run) -> None:
    arguments = ("--src", "dp=3,fsdp=8", "--dst", "engine:tp=8")
    code, out, _ = run("plan", *QWEN, *arguments, "--lost", "3,5")
    assert code == 0
    assert "from \\ to" not in out
    assert "largest pairs" in out and "busiest senders" in out
    assert "ranks 3, 5 send nothing" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--colocate",),
        ("--src-ranks", "9,3,40-45", "--dst-ranks", "41,7,1,60-64"),
        ("--src-ranks", "0-7", "--dst-ranks", "8-15"),
    ],
)
def test_pairs_messages_and_staging_are_those_counted_one_by_one(
    monkeypatch, tmp_path: Path, small: Path, options: tuple[str, ...]
) -> None:
    ranks = [ranks_of(text) for text in options[1::2]]
    given = dict(zip(("src_ranks", "dst_ranks"), ranks, strict=True)) if ranks else {}
    asked_for = Options(model=str(small), src="zero3=8", dst="engine:replicas=2,tp=4")
    planned = make(replace(asked(asked_for), colocate=not ranks, **given))
    pairs = planned.cost.pair_bytes
    monkeypatch.setattr(facts, "BUCKET_BYTES", 500)
    ends: Counter[int] = Counter()
    for end in (0, 1):
        for rank in {pair[end] for pair in pairs}:
            most = max(size for pair, size in pairs.items() if pair[end] == rank)
            ends[rank] += 2 * min(most, 500)
    listed = sorted([[*pair, size] for pair, size in pairs.items()], key=lambda p: (-p[2], *p))
    for most in (1, 5, 20, 1024):
        monkeypatch.setattr(facts, "MAX_PAIRS", most)
        told = facts.document(planned)["traffic"]
        assert told["pair_bytes"] == listed[:most]
    assert told["num_pairs"] == len(pairs)
    assert told["num_messages"] == sum(-(-size // 500) for size in pairs.values())
    assert told["staging_bytes"] == max(ends.values())


def test_dtype_scales_the_bytes(run) -> None:
    told = []
    for dtype in ("bf16", "fp32"):
        arguments = ("--src", "fsdp=2", "--dst", "engine:tp=2", "--dtype", dtype, "--json", "-")
        told.append(json.loads(run("plan", *QWEN, *arguments)[1])["traffic"]["wire_bytes"])
    assert told[1] == 2 * told[0]


def test_lora_plans_the_factors_alone(run) -> None:
    arguments = ("--src", "fsdp=2", "--dst", "engine:tp=2", "--lora", 8, "--json", "-")
    flows = json.loads(run("plan", *QWEN, *arguments)[1])["plan"]["flows"]
    assert flows and all(".lora_" in flow["key"] for flow in flows)


def test_scales_of_fp8_keep_their_dtype(run) -> None:
    arguments = ("--src", "fsdp=2", "--dst", "engine:tp=2", "--fp8", "--json", "-")
    flows = json.loads(run("plan", *QWEN, *arguments)[1])["plan"]["flows"]
    assert {flow["dtype"] for flow in flows} == {None, "float8_e4m3fn", "float32"}


def test_json_alone_is_on_standard_output(run, small: Path) -> None:
    code, out, err = run("plan", "--model", small, *SMALL_PAIR, "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out)["format"] == "shardloop-reshard-plan"


def test_verify_accepts_the_plan_that_was_written(run, saved: Path) -> None:
    told = json.loads(saved.read_text())
    told["seconds"]["plan"] = 99.0  # nobody's claim
    saved.write_text(json.dumps(told))
    code, out, _ = run("verify", saved)
    assert code == 0
    assert f"digest {told['proof']['digest']}" in out and "exactly once" in out


def _set(path: str, value: Any):
    def edit(told: dict[str, Any]) -> None:
        place: Any = told
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in way:
            place = place[step]
        place[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_set("proof.digest", "0" * 64), "proof.digest is '0000"),
        (_set("traffic.pair_bytes.0.2", 1), "traffic.pair_bytes[0][2] is 1, the plan has "),
        (_set("transfers.receives.3.box.0.0", 77), "transfers.receives[3].box[0][0] is 77"),
        (_set("transfers.receives.3.src_rank", 9), "transfers.receives[3].src_rank is 9"),
        (_set("request.dst", "engine:replicas=4,tp=2"), "dst.layout is 'engine:replicas=2,tp=4'"),
        (_set("request.src_ranks", [3, 2, 1, 0]), "src.ranks[0] is 0, the plan has 3"),
        (_set("request.config.num_hidden_layers", 4), "model.num_elements is "),
        (_set("request.fp8", True), "proof.digest is "),
        (_set("plan.flows.0.num_pairs.0", True), "plan.flows[0].num_pairs[0] is True"),
        (_set("note", "mine"), "note is not part of the plan"),
        (lambda told: told.pop("traffic"), "traffic is missing"),
        (lambda told: told["transfers"]["receives"].pop(), "transfers.receives is "),
    ],
)
def test_plan_edited_by_hand_is_refused(run, saved: Path, edit, told: str) -> None:
    plan = json.loads(saved.read_text())
    edit(plan)
    saved.write_text(json.dumps(plan))
    code, out, err = run("verify", saved)
    assert (code, out) == (4, "")
    assert "is not the plan of its request" in err and told in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no shardloop-reshard-plan of version 1"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"format": "shardloop-reshard-plan", "version": 2}', "no shardloop-reshard-plan of"),
        ('{"format": "shardloop-reshard-plan", "version": 1}', "request is no object"),
        (
            '{"format": "shardloop-reshard-plan", "version": 1, "request": {"src": 3, "my": 1}}',
            "model is missing; config is missing",
        ),
        (
            '{"format": "shardloop-reshard-plan", "version": 1, "request": {"src": 3, "my": 1}}',
            "my is unknown; src=3; it must be a layout",
        ),
    ],
)
def test_file_that_is_no_plan_is_refused(run, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, _, err = run("verify", path)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("dtype", ["bf16"], "dtype=['bf16']; it must be one of bf16, fp16, fp32"),
        ("dtype", {}, "dtype={}; it must be one of"),
        ("gb_per_s", 10**400, "choose a speed from 0.001 to 1e+06"),
        ("gb_per_s", float("inf"), "gb-per-s=inf; choose a speed"),
        ("lora", 0, "lora=0; choose a rank"),
        ("lora", 10**18, "choose a rank from 1 to 65536"),
        ("colocate", True, "--colocate gives both layouts their ranks"),
        ("rank", True, "rank=True; it must be null or a whole number"),
        ("lost", [0.0], "lost=[0.0]; it must be whole numbers"),
        ("src_ranks", [0, 1, 1, -2], "src-ranks: 1, -2 occur twice or are below 0"),
    ],
)
def test_request_in_a_file_has_the_limits_of_the_command_line(run, saved: Path, part, value, told):
    plan = json.loads(saved.read_text())
    plan["request"].update({"src_ranks": [0, 1, 2, 3], part: value})
    saved.write_text(json.dumps(plan))
    code, out, err = run("verify", saved)
    assert (code, out) == (2, "")
    assert told in err


def test_bytes_that_64_bits_cannot_count_are_refused(run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    huge = {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 8}
    path.write_text(json.dumps({**SMALL, **huge}))
    code, out, err = run("plan", "--model", path, "--src", "fsdp=2", "--dst", "engine:tp=2")
    assert (code, out) == (2, "")
    assert "most of them model.embed_tokens.weight [2147483647, 2147483640]; choose sizes" in err


def test_more_pairs_of_ranks_than_can_be_counted_are_refused(run) -> None:
    code, out, err = run("plan", *QWEN, "--src", "dp=65536", "--dst", "engine:replicas=8192")
    assert (code, out) == (2, "")
    assert "have 65,536 x 8,192 pairs of ranks" in err and "at most 268,435,456" in err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--src", "fsdp=2", "--dst", "engine:tp=3"], 2, "tp=3 does not divide num_heads=16"),
        (["--src", "fsdp=2", "--dst", "engine:tp=3"], 2, "choose tp from 1, 2, 4, 8, 16"),
        (["--src", "fsdp=-2", "--dst", "engine:tp=2"], 2, "fsdp=-2; choose a whole number"),
        (["--src", "fsdp=0", "--dst", "engine:tp=2"], 2, "fsdp=0; choose a whole number"),
        (["--src", "fdsp=2", "--dst", "engine:tp=2"], 2, "no axis 'fdsp'"),
        (["--src", "fsdp=2", "--dst", "vllm:tp=2"], 2, "unknown scheme 'vllm'"),
        (["--src", "fsdp=2"], 2, "--dst missing"),
        (["--src-ranks", "0,1,1"], 2, "ranks '0,1,1': 1 occur twice"),
        (["--src-ranks", "1-0"], 2, "'1-0' runs backwards; write 0-1"),
        (["--src-ranks", "a"], 2, "'a' is no rank; write for example 0-3,8"),
        (["--src-ranks", "0-99999999999"], 2, "choose ranks below 131072"),
        (["--src-ranks", "9" * 5000], 2, "choose ranks below 131072"),
        (["--src-ranks", "131072,1"], 2, "'131072'; choose ranks below 131072"),
        (["--src-ranks", "0-3"], 2, "src-ranks lists 4 ranks (0, 1, 2, 3), layout fsdp=2 has 2"),
        (["--dst-ranks", "0-99999"], 2, "5, 6, 7, and 99992 more), layout engine:tp=2 has 2; list"),
        (
            ["--dst-ranks", "4", "--lost", "4"],
            2,
            "lost: 4 not among the 2 ranks of the source (0, 1)",
        ),
        (["--dst-ranks", "4", "--lost", "4"], 2, "lost: 4 among the ranks of the destination"),
        (["--colocate", "--dst-ranks", "0-1"], 2, "--colocate gives both layouts their ranks"),
        (["--lost", "7"], 2, "lost: 7 not among the 2 ranks of the source (0, 1)"),
        (["--lost", "1"], 4, "no rank holds all of these tensors"),
        (["--rank", "4"], 2, "rank=4 takes no part; choose from 0-3"),
        (["--gb-per-s", "0"], 2, "gb-per-s=0.0; choose a speed from 0.001 to 1e+06"),
        (["--gb-per-s", "nan"], 2, "gb-per-s=nan; choose a speed"),
        (["--gb-per-s", "1e-320"], 2, "choose a speed from 0.001"),
        (["--lora", "0", "--gb-per-s", "0"], 2, "gb-per-s=0.0; choose"),
        (["--lora", "0", "--gb-per-s", "0"], 2, "lora=0; choose a rank from 1 to 65536"),
        (["--lora", "1000000000000000000"], 2, "choose a rank from 1 to 65536"),
        (["--lora", "8", "--fp8"], 2, "leave out --fp8"),
        (["--tensor", "q_proj.weight"], 2, "add --picture FILE"),
        (["--picture", "map.gif"], 2, "'map.gif' ends in .gif; choose from .png, .svg, .pdf"),
        (["--picture", "/no/map.svg"], 2, "picture='/no/map.svg' cannot be written: No such file"),
        (["--json", "/no/plan.json"], 2, "json='/no/plan.json' cannot be written: No such file"),
        (
            ["--picture", "map.svg", "--tensor", "k_prj.weight"],
            *(2, "the nearest are model.layers.{layer}.self_attn.k_proj.weight"),
        ),
        (
            ["--picture", "map.svg", "--tensor", "model.layers.28.mlp.up_proj.weight"],
            *(2, "has no layer 28; choose from 0 to 27"),
        ),
    ],
)
def test_a_wrong_request_is_one_clear_error(run, monkeypatch, tmp_path, arguments, code, told):
    monkeypatch.chdir(tmp_path)
    if "--src" not in arguments:
        arguments = ["--src", "fsdp=2", "--dst", "engine:tp=2", *arguments]
    got, out, err = run("plan", *QWEN, *arguments)
    assert got == code, err
    assert out == "", "nothing is told of a plan that is refused"
    assert told in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen3-06b", "did you mean Qwen3-0.6B?"),
        ("/no/such/config.json", "/no/such/config.json: cannot be read as a model's config"),
    ],
)
def test_unknown_model_is_refused_with_what_is_near(run, name: str, told: str) -> None:
    code, _, err = run("plan", "--model", name, "--src", "fsdp=2", "--dst", "engine:tp=2")
    assert code == 2
    assert told in err


def test_kv_groups_that_tp_would_straddle_are_refused(run, tmp_path: Path) -> None:
    config = SMALL | {"num_attention_heads": 12, "num_key_value_heads": 4, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run("plan", "--model", tmp_path, "--src", "fsdp=2", "--dst", "engine:tp=6")
    assert code == 2
    assert "tp=6" in err and "num_kv_heads=4" in err


def test_verify_takes_a_file_or_layouts_not_both(run, saved: Path) -> None:
    code, _, err = run("verify", saved, "--src", "fsdp=2")
    assert (code, "leave out the other options" in err) == (2, True)
    assert run("verify", *QWEN, "--src", "fsdp=2", "--dst", "engine:tp=2")[0] == 0


def test_unknown_action_is_refused(run) -> None:
    code, _, err = run("prove")
    assert (code, "no command reshard 'prove'; choose from plan, verify" in err) == (2, True)


def test_help_shows_both_commands_with_examples(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for flag in ("--model", "--src", "--dst", "--picture", "--json", "--lost", "FILE"):
        assert flag in out
    assert "shardloop reshard verify plan.json" in out


def test_planning_loads_neither_torch_nor_matplotlib() -> None:
    program = (
        "import sys; from shardloop.cli.main import main; assert main(sys.argv[1:]) == 0;"
        "sys.exit(' '.join({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    arguments = ["reshard", "plan", *QWEN, "--src", "fsdp=2", "--dst", "engine:tp=2"]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_messages_are_counted_by_the_size_that_executors_use() -> None:
    from shardloop.transport.base import BUCKET_BYTES as theirs

    assert theirs == BUCKET_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_ranks_read_back_as_they_were_written(seed: int) -> None:
    rng = random.Random(seed)
    ranks = tuple(rng.sample(range(40), rng.randint(1, 30)))
    if rng.random() < 0.5:
        ranks = tuple(sorted(ranks))
    assert ranks_of(spans(ranks)) == ranks


def test_table_of_the_page_is_what_the_command_prints(run) -> None:
    page = (ROOT / "docs/resharding.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    _, out, _ = run("plan", "--model", "Qwen3-0.6B", "--src", "fsdp=8", "--dst", "engine:tp=4")
    measured = re.compile(r"^planned in .*$", flags=re.MULTILINE)
    assert measured.sub("", told) == measured.sub("", out)
