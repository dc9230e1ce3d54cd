"""The benchmarks run, at toy sizes, and compare what is equal. No time is asserted."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import head, reshard, reshard_delta, reshard_transfer, rollout
from benchmarks.goals import Goal
from benchmarks.load import Load
from benchmarks.models import EOS, ModelSize, write_model
from benchmarks.parity import difference_interval
from benchmarks.peer_engines import ContinuousBatching, StaticGenerate
from benchmarks.reshard_bound import least_busiest
from benchmarks.reshard_cases import Case as PlanningCase
from benchmarks.reshard_cases import planned
from benchmarks.reshard_limits import traffic_of
from benchmarks.reshard_ranks import Case as TransferCase
from benchmarks.results import write as write_results
from shardloop import hf
from shardloop.layout import Layout, box_of
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import Plan

TOY = ModelSize(layers=1, width=64, heads=2, kv_heads=1, ffn=96, vocab=300, context=128)
LOAD = Load(prompts=3, samples=4, prompt_tokens=5, median=8, sigma=1.0, cap=20, vocab=300)


def test_load_is_ragged_capped_and_shares_prompts_within_groups() -> None:
    requests = LOAD.requests()
    assert [r.sampling.max_tokens for r in requests] == LOAD.lengths()
    assert len(set(LOAD.lengths())) > 3 and 1 <= min(LOAD.lengths()) <= max(LOAD.lengths()) <= 20
    prompts = [r.prompt_ids for r in requests]
    assert len(set(prompts)) == 3
    assert all(len(set(prompts[start : start + 4])) == 1 for start in (0, 4, 8))


@pytest.mark.parametrize("mean_length", [8, 64])
def test_model_ends_with_the_asked_probability_at_every_position(
    mean_length: int, tmp_path: Path, seed: int
) -> None:
    size = ModelSize(layers=2, vocab=2000)
    model = hf.load_model(
        write_model(tmp_path, size, seed=seed, mean_length=mean_length), dtype=torch.float32
    )
    ids = torch.randint(3, size.vocab, (4, 32))
    with torch.no_grad():
        ends_BT = model(input_ids=ids).logits.softmax(-1)[..., EOS]
    assert ends_BT.mean().item() == pytest.approx(1 / mean_length, rel=0.1)
    assert ends_BT.std().item() < 0.5 / mean_length


@pytest.mark.slow
def test_rollout_benchmark_runs_and_counts_what_it_made(tmp_path: Path) -> None:
    """Equality with transformers is asserted inside, before any timing."""
    rollout.main(["--smoke", "--slots", "4", "--json", str(tmp_path / "rollout.json")])
    results = json.loads((tmp_path / "rollout.json").read_text())
    assert results["largest_logprob_difference"] <= rollout.ATOL
    load = rollout.SMOKE.load
    ours = results["arms"]["ours"]
    assert ours["tokens"] == sum(load.lengths())
    assert ours["prefilled_tokens"] == load.prompts * load.prompt_tokens
    assert results["occupancy"]["while_waiting"] == 1.0
    (tmp_path / "results.md").write_text("# Results\n\n## head\n\nkept\n\n## rollout\n\nold\n")
    for _ in range(2):
        write_results([tmp_path / "rollout.json"], tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text()
    assert "| generate_batch | " in text and "old" not in text
    assert text.count("## ") == 2 and "## head\n\nkept\n\n## rollout\n\nOn " in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_head_benchmark_runs_in_all_arms(tmp_path: Path) -> None:
    """Also in the fresh process of each arm that its memory is read from."""
    head.main(["--smoke", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(results) == len(head.SMOKE)
    for result in results:
        assert {"ours", "full logits"} <= set(result["arms"])
        assert all(arm["cpu_s"][0] > 0 for arm in result["arms"].values())


def test_head_benchmark_times_no_arm_that_differs() -> None:
    case = head.SMOKE[0]
    right = head.prepare(head.naive_bonus, case)
    head.require_equal({"full logits": right, "ours": head.prepare(head.ours, case)})
    with pytest.raises(SystemExit, match="wrong: gradient of hidden is off by"):
        head.require_equal({"full logits": right, "wrong": head.prepare(head.naive, case)})


@pytest.mark.parametrize("arm", [StaticGenerate, ContinuousBatching])
def test_peers_sample_from_the_full_distribution(arm: type, tmp_path: Path) -> None:
    """transformers keeps the 50 likeliest tokens where its defaults are left alone."""
    folder, requests = write_model(tmp_path, TOY), LOAD.requests()
    model = hf.load_model(folder, dtype=torch.float32)
    peer = (
        StaticGenerate(model, requests, batch_size=4)
        if arm is StaticGenerate
        else ContinuousBatching(folder, requests)
    )
    made = peer.tokens()
    assert [len(tokens) for tokens in made] == LOAD.lengths()
    num_likely = 0
    for request, tokens in zip(requests, made, strict=True):
        ids = torch.tensor([*request.prompt_ids, *tokens])
        with torch.no_grad():
            logits_TV = model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1]
        drawn_T1 = logits_TV.gather(1, torch.tensor(tokens)[:, None])
        num_likely += int(((logits_TV > drawn_T1).sum(1) < 50).sum())
    assert num_likely < 0.6 * sum(LOAD.lengths()), (
        "almost flat: a third of the mass is in 50 of 300"
    )


def test_difference_interval_holds_zero_for_equal_means_only() -> None:
    equal = difference_interval([0.50, 0.52, 0.48], [0.51, 0.49, 0.50])
    assert equal.low < 0 < equal.high
    other = difference_interval([0.50, 0.52, 0.48], [0.71, 0.69, 0.70])
    assert other.high < 0
    swapped = difference_interval([0.71, 0.69, 0.70], [0.50, 0.52, 0.48])
    assert swapped.low == pytest.approx(-other.high)


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_grpo_benchmark_runs_on_equal_losses_and_gradients(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from benchmarks import grpo

    grpo.main(["--smoke", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    differences = results["train"]["largest_relative_difference"]
    assert set(differences) == {"ours", "trl", "trl, no checkpointing"}
    assert max(differences.values()) <= grpo.RTOL
    assert set(results["whole"]["arms"]) == {"ours", "trl"}


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_parity_benchmark_runs_and_claims_nothing_from_a_few_steps(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from benchmarks import parity

    files = ["--svg", str(tmp_path / "out.svg"), "--json", str(tmp_path / "out.json")]
    parity.main(["--smoke", *files])
    results = json.loads((tmp_path / "out.json").read_text())
    assert [len(curve) for curve in results["curves"]["trl"]] == [parity.SMOKE.steps] * 2
    assert not results["verdict"]["parity"]
    assert (tmp_path / "out.svg").read_text().count("<path") > 4


@pytest.mark.slow
@pytest.mark.parametrize("part", reshard.PARTS)
def test_reshard_benchmark_runs_on_equal_results(part: str, tmp_path: Path) -> None:
    """Equality is asserted inside, before any timing; what is counted must be right at any size."""
    reshard.main(["--smoke", "--only", part, "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"benchmark", "environment", part}
    goals = results[part]["goals"]
    counted = [goal for goal in goals if "bytes / minimum" in goal["what"]]
    assert all(goal["met"] for goal in counted) and bool(counted) == (
        part in ("planning", "transfer")
    )
    write_results([tmp_path / "out.json"], tmp_path / "results.md")
    assert goals[0]["text"] in (tmp_path / "results.md").read_text()


TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 32,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4}


def _tiny_plan(src: str, dst: str, *, same_ranks: bool, experts: bool) -> Plan:
    model, changes = ("Llama-3.1-8B", TINY)
    if experts:
        model, changes = "Qwen3-30B-A3B", TINY | TINY_EXPERTS
    case = PlanningCase(
        model=model, src=src, dst=dst, same_ranks=same_ranks, changes=tuple(changes.items())
    )
    return planned(case)[0]


def _bound_by_elements(plan: Plan) -> float:
    """Over all sets of source ranks: what only they hold and a destination lacks, per rank."""
    holders: dict[tuple[str, int], int] = {}
    for rank in range(plan.src.world_size):
        for name, element in _elements(plan.src, rank):
            holders[name, element] = holders.get((name, element), 0) | 1 << rank
    num_bytes: dict[int, int] = {}
    for rank in range(plan.dst.world_size):
        twin = plan.src_index.get(plan.dst_ranks[rank])
        for wanted in _elements(plan.dst, rank):
            held_by = holders[wanted]
            if twin is None or not held_by >> twin & 1:
                num_bytes[held_by] = num_bytes.get(held_by, 0) + 2
    return max(
        sum(size for held_by, size in num_bytes.items() if held_by & ~ranks == 0)
        / ranks.bit_count()
        for ranks in range(1, 1 << plan.src.world_size)
    )


def _elements(layout: Layout, rank: int) -> set[tuple[str, int]]:
    """Names and flat numbers of a rank's elements."""
    shapes = layout.model.tensor_shapes()
    found = set()
    for piece in layout.pieces(rank):
        shape = shapes[piece.name]
        numbers = torch.arange(math.prod(shape)).view(shape)
        found |= {(piece.name, n) for n in box_of(numbers, piece.box).reshape(-1).tolist()}
    return found


@pytest.mark.parametrize(
    ("src", "dst", "same_ranks", "experts", "exact"),
    [
        ("fsdp=3", "engine:tp=2", False, False, True),
        ("dp=2,fsdp=2", "engine:tp=2", False, False, True),
        ("dp=2,fsdp=2", "engine:tp=2", True, False, True),
        ("engine:tp=4", "engine:tp=2", False, False, False),
        ("megatron:pp=2,dp=2,tp=2", "engine:replicas=2,tp=2", False, False, True),
        ("megatron:pp=2,ep=4", "engine:tp=2", False, True, False),
        ("megatron:pp=2,ep=4", "engine:tp=2", True, True, False),
    ],
)
def test_least_load_is_a_lower_bound_and_exact_where_holders_are_nested(
    src: str, dst: str, same_ranks: bool, experts: bool, exact: bool
) -> None:
    plan = _tiny_plan(src, dst, same_ranks=same_ranks, experts=experts)
    bound, wanted = least_busiest(plan, itemsize=2), _bound_by_elements(plan)
    assert bound <= wanted <= max(cost(plan, itemsize=2).send_bytes.values())
    assert bound > 0.5 * wanted
    if exact:
        assert bound == wanted


@pytest.mark.parametrize("same_ranks", [False, True])
def test_limits_move_the_bytes_of_the_plan_between_the_same_ranks(same_ranks: bool) -> None:
    case = TransferCase(src="fsdp=2", dst="engine:tp=2", same_ranks=same_ranks)
    plan = case.plan(reshard_transfer.SMOKE.config)
    traffic = {rank: traffic_of(plan, rank, 2) for rank in plan.ranks}
    counted = cost(plan, itemsize=2)
    sent = {(a, b): n for a, one in traffic.items() for b, n in one.sends.items()}
    received = {(a, b): n for b, one in traffic.items() for a, n in one.receives.items()}
    assert sent == received == dict(counted.pair_bytes)
    assert sum(one.local for one in traffic.values()) == counted.local_bytes


def test_delta_pair_goes_to_and_fro_and_sends_what_changed_alone() -> None:
    versions, predicted, std = reshard_delta.make_versions(2**16, 0.05)
    pair = reshard_delta.Pair(versions)
    changed = int((versions[0].view(torch.int16) != versions[1].view(torch.int16)).sum())
    assert abs(changed / 2**16 - predicted) < 5 * std
    for version in (versions[1], versions[0], versions[1]):
        pair.claim()
        pair.send()
        assert sum(len(delta.values) for delta in pair.deltas) == changed
        pair.receive()
        assert torch.equal(pair.held.view(torch.int16), version.view(torch.int16))


def test_goals_say_whether_they_are_met() -> None:
    assert Goal(what="a", value=1.0, limit=1.0).met
    assert not Goal(what="a", value=0.9, limit=1.0, at_least=True).met
    assert str(Goal(what="wait", value=2.5, limit=2, unit=" s")) == (
        "wait: 2.5 s, goal <= 2: NOT MET"
    )
