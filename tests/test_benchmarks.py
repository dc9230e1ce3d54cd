"""The benchmarks run, at toy sizes, and compare what is equal. No time is asserted."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import head, rollout
from benchmarks.load import Load
from benchmarks.models import EOS, ModelSize, write_model
from benchmarks.parity import difference_interval
from benchmarks.peer_engines import ContinuousBatching, StaticGenerate
from benchmarks.results import write as write_results
from shardloop import hf

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
    write_results([tmp_path / "rollout.json"], tmp_path / "results.md")
    assert "| generate_batch | " in (tmp_path / "results.md").read_text()


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
