"""The engine against transformers' own forward and generate, and against itself."""

import math
import random

import pytest
import torch

from shardloop import hf
from shardloop.engines.gate import NO_WEIGHTS
from shardloop.errors import ModelError, PlanError, PolicyDiverged, UsageError
from shardloop.types import Completion, Request, SampleId, Sampling
from tests.engines.models import (
    CONTEXT,
    KINDS,
    VOCAB,
    empty_engine,
    make_engine,
    make_requests,
    model_folder,
    run_threads,
    transformers_model,
    weights_of,
)

LLAMA = hf.load_config(model_folder("llama"))


def logprobs_by_transformers(model, completion: Completion) -> list[float]:
    request = completion.request
    ids = (*request.prompt_ids, *completion.token_ids_T)
    scored = hf.sequence_logprobs(model, ids, temperature=request.sampling.temperature or 1.0)
    return scored[len(request.prompt_ids) - 1 :].tolist()


def by_sample(completions: list[Completion]) -> dict[SampleId, Completion]:
    return {completion.request.sample_id: completion for completion in completions}


def run_out(engine) -> list[Completion]:
    """Step until nothing is in flight."""
    finished = []
    while engine.num_in_flight:
        finished += engine.step()
    return finished


def same(ours: list[Completion], theirs: list[Completion], *, atol: float = 1e-12) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.request == other.request
        assert mine.token_ids_T == other.token_ids_T
        assert mine.finish_reason == other.finish_reason
        assert mine.behave_T == pytest.approx(other.behave_T, abs=atol, rel=0)
        assert mine.full_T == pytest.approx(other.full_T, abs=atol, rel=0)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_a_transformers_forward_in_float64(kind):
    model = transformers_model(kind)
    for completion in make_engine(kind).generate(make_requests(max_tokens=20, temperature=0.7)):
        expected = logprobs_by_transformers(model, completion)
        assert completion.full_T == pytest.approx(expected, abs=1e-12, rel=0)
        assert completion.behave_T == completion.full_T
        assert len(completion.token_ids_T) == 20


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_float32_log_probs_stay_within_their_bound(kind):
    model = transformers_model(kind)
    for completion in make_engine(kind, dtype=torch.float32).generate(make_requests()):
        expected = logprobs_by_transformers(model, completion)
        assert completion.full_T == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers_generate(kind):
    model = transformers_model(kind)
    requests = make_requests(samples=1, max_tokens=16, temperature=0.0)
    for request, completion in zip(requests, make_engine(kind).generate(requests), strict=True):
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.token_ids_T == tuple(out[0, ids.shape[1] :].tolist())
        assert completion.behave_T == (0.0,) * 16
        expected = logprobs_by_transformers(model, completion)
        assert completion.full_T == pytest.approx(expected, abs=1e-12, rel=0)


@pytest.mark.parametrize("max_slots", [1, 3, 5, 64])
def test_a_sample_does_not_depend_on_its_batch_or_slot(max_slots):
    requests = make_requests(
        prompts=5, samples=4, max_tokens=9, top_p=0.9, stop_token_ids=(3, 7, 11)
    )
    alone = [make_engine("qwen3").generate([request])[0] for request in requests]
    assert len({len(completion.token_ids_T) for completion in alone}) > 3, "lengths are ragged"
    same(make_engine("qwen3", max_slots=max_slots).generate(requests), alone)
    backwards = make_engine("qwen3", max_slots=max_slots).generate(requests[::-1])
    same(backwards[::-1], alone)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
def test_completions_do_not_depend_on_the_number_of_ranks(kind, size):
    requests = make_requests(max_tokens=8, top_k=20, stop_token_ids=(3, 7))
    whole = make_engine(kind, max_slots=5).generate(requests)
    for cut in run_threads(
        lambda comm: make_engine(kind, comm=comm, max_slots=5).generate(requests), size
    ):
        same(cut, whole)


@pytest.mark.parametrize("max_slots", [3, 64])
def test_a_prompt_goes_through_the_model_once(max_slots):
    engine = make_engine("llama", max_slots=max_slots)
    requests = make_requests(prompts=4, samples=5)
    engine.generate(requests)
    once = sum(len(prompt) for prompt in {request.prompt_ids for request in requests})
    assert engine.num_prefilled_tokens == once
    assert len(engine._prefixes) == 0, "no prefix outlives its requests"


def test_a_free_slot_is_refilled_at_once():
    lengths = [6, 1, 2, 1, 1, 1]
    requests = [
        Request(
            prompt_ids=(1, 2),
            sampling=Sampling(max_tokens=length),
            sample_id=SampleId(prompt_uid="p", index=index),
            seed=0,
        )
        for index, length in enumerate(lengths)
    ]
    engine = make_engine("llama", max_slots=2)
    engine.generate(requests)
    # One slot is busy for 6 steps; the other serves 1 + 2 + 1 + 1 + 1 in the same 6.
    assert (engine.num_steps, engine.num_drawn_tokens) == (6, sum(lengths))


def lengths_of_a_long_tail(num: int) -> list[int]:
    """Log-normal: median 8, most far shorter than the longest."""
    rng = random.Random(0)
    return [max(1, min(50, round(8 * math.exp(rng.gauss(0, 1))))) for _ in range(num)]


def test_slots_stay_occupied_while_requests_queue():
    lengths = lengths_of_a_long_tail(90)
    requests = [
        Request(
            prompt_ids=(1, 2 + index // 8),
            sampling=Sampling(max_tokens=length),
            sample_id=SampleId(prompt_uid="p", index=index),
            seed=0,
        )
        for index, length in enumerate(lengths)
    ]
    engine, used = make_engine("llama", max_slots=6), []
    assert engine.occupancy == 1.0, "nothing has had to queue"
    engine.submit(requests)
    while engine.num_in_flight:
        queued, before = len(engine._queue), engine.num_drawn_tokens
        engine.step()
        if queued:
            used.append(engine.num_drawn_tokens - before)
    assert engine.num_drawn_tokens == sum(lengths)
    assert engine.occupancy == sum(used) / (6 * len(used)) >= 0.95
    # Batches of 6 that wait for their longest would have left more than half of it idle.
    batches = [lengths[start : start + 6] for start in range(0, 90, 6)]
    assert sum(lengths) / (6 * sum(map(max, batches))) < 0.5


def test_a_prompt_that_is_submitted_again_while_in_flight_is_not_computed_again():
    requests = make_requests(prompts=2, samples=6, max_tokens=7)
    engine, finished = make_engine("llama", max_slots=4), []
    for batch in (requests[:3], requests[6:8], requests[3:6], requests[8:]):
        engine.submit(batch)
        finished += engine.step()
    finished += run_out(engine)
    once = sum(len(prompt) for prompt in {request.prompt_ids for request in requests})
    assert engine.num_prefilled_tokens == once
    assert len(finished) == len(requests)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_weights_may_change_after_any_steps_under_a_full_queue(every):
    lengths = lengths_of_a_long_tail(14)
    requests = [
        Request(
            prompt_ids=(4, 5 + index % 3),
            sampling=Sampling(max_tokens=min(length, 12), temperature=0.8),
            sample_id=SampleId(prompt_uid="p", index=index),
            seed=1,
        )
        for index, length in enumerate(lengths)
    ]
    engine, finished = make_engine("llama", max_slots=4), []
    engine.submit(requests)
    while engine.num_in_flight:
        if engine.num_steps and engine.num_steps % every == 0:
            version = engine.version + 1
            engine.load_from_state_dict(weights_of("llama", version % 2), version=version)
        finished += engine.step()
    assert sorted(c.request.sample_id.index for c in finished) == list(range(14))
    models = [transformers_model("llama", seed=seed) for seed in (0, 1)]
    for completion in finished:
        versions = completion.version_T
        assert versions == tuple(sorted(versions))
        assert len(versions) == completion.request.sampling.max_tokens
        expected = [logprobs_by_transformers(model, completion) for model in models]
        wanted = [expected[version % 2][place] for place, version in enumerate(versions)]
        assert completion.full_T == pytest.approx(wanted, abs=1e-12, rel=0)
    assert engine.version > 20 // every


def test_the_stop_token_is_kept_and_ends_the_sample():
    (free,) = make_engine("llama").generate(make_requests(prompts=1, samples=1, max_tokens=8))
    stop = free.token_ids_T[4]
    first = free.token_ids_T.index(stop)
    (ended,) = make_engine("llama").generate(
        make_requests(prompts=1, samples=1, max_tokens=8, stop_token_ids=(36, stop))
    )
    assert (free.finish_reason, ended.finish_reason) == ("length", "stop")
    assert ended.token_ids_T == free.token_ids_T[: first + 1]
    assert ended.full_T == pytest.approx(free.full_T[: first + 1], abs=1e-12)
    assert ended.loss_mask_T == (1,) * (first + 1)


def test_abort_returns_what_was_drawn_and_leaves_the_others_alone():
    requests = make_requests(prompts=2, samples=3, max_tokens=8)
    whole = by_sample(make_engine("llama").generate(requests))
    engine = make_engine("llama", max_slots=4)
    engine.submit(requests)
    for _ in range(3):
        assert engine.step() == []
    gone = [requests[5].sample_id, requests[1].sample_id, requests[0].sample_id]
    queued, *active = engine.abort(gone)
    assert [c.request.sample_id for c in (queued, *active)] == gone
    assert {c.finish_reason for c in (queued, *active)} == {"aborted"}
    assert queued.token_ids_T == ()
    for completion in active:
        full = whole[completion.request.sample_id]
        assert completion.token_ids_T == full.token_ids_T[:3]
        assert completion.behave_T == pytest.approx(full.behave_T[:3], abs=1e-12)
    rest = sorted(run_out(engine), key=lambda c: requests.index(c.request))
    same(rest, [whole[request.sample_id] for request in requests[2:5]])
    with pytest.raises(UsageError, match="not in flight"):
        engine.abort(gone[:1])


def test_generate_leaves_other_requests_to_the_next_step():
    requests = make_requests(prompts=2, samples=2, max_tokens=5)
    engine = make_engine("llama")
    engine.submit(requests[:2])
    ours = engine.generate(requests[2:])
    assert [c.request for c in ours] == requests[2:]
    others = by_sample(engine.step())
    assert set(others) == {request.sample_id for request in requests[:2]}
    assert engine.num_in_flight == 0


def test_a_prompt_after_an_update_sees_only_new_weights():
    requests = make_requests(max_tokens=6)
    engine = make_engine("qwen2")
    old = engine.generate(requests)
    engine.load_from_state_dict(weights_of("qwen2", 1), version=1)
    new = engine.generate(requests)
    same(new, make_engine("qwen2", seed=1).generate(requests))
    assert [c.token_ids_T for c in new] != [c.token_ids_T for c in old]
    assert {v for c in new for v in c.version_T} == {1}


@pytest.mark.parametrize("max_slots", [4, 64])
def test_requests_in_flight_go_on_under_new_weights_and_say_so(max_slots):
    requests = make_requests(max_tokens=9, temperature=0.9)
    engine = make_engine("llama", max_slots=max_slots)
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    engine.load_from_state_dict(weights_of("llama", 1), version=5)
    completions = run_out(engine)
    models = {0: transformers_model("llama"), 5: transformers_model("llama", seed=1)}
    assert len(completions) == len(requests)
    for completion in completions:
        versions = completion.version_T
        started_before = versions[0] == 0
        assert versions == ((0,) * 3 + (5,) * 6 if started_before else (5,) * 9)
        # Each token's log-prob is that of a whole forward of the weights it names: had any old
        # key or value survived the update, the later ones would differ.
        expected = {v: logprobs_by_transformers(model, completion) for v, model in models.items()}
        for place, version in enumerate(versions):
            assert completion.full_T[place] == pytest.approx(expected[version][place], abs=1e-12)
    mixed = [completion for completion in completions if len(set(completion.version_T)) == 2]
    assert len(mixed) == min(max_slots, len(requests))


def test_nothing_runs_without_weights_or_within_an_update():
    engine = empty_engine(LLAMA)
    assert engine.version == NO_WEIGHTS
    requests = make_requests(prompts=1, samples=1)
    with pytest.raises(UsageError, match="without weights"):
        engine.generate(requests)
    with pytest.raises(UsageError, match="write outside an update"):
        engine.write([])
    with pytest.raises(UsageError, match="commit_update outside an update"):
        engine.commit_update()
    engine.load_from_state_dict(weights_of("llama"), version=3)
    assert engine.version == 3
    engine.begin_update(4)
    assert engine.version == 3
    for call in (engine.step, lambda: engine.generate(requests)):
        with pytest.raises(UsageError, match="update to version=4 is open"):
            call()
    engine.commit_update()
    assert engine.version == 4
    assert len(engine.generate(requests)) == 1


def test_a_commit_with_unwritten_elements_is_refused_by_name():
    engine = empty_engine(hf.load_config(model_folder("qwen3")))
    engine.begin_update(0)
    for name, tensor in engine.tensors().items():
        tensor.fill_(0.01)
        if name == "model.layers.1.self_attn.qkv_proj.weight":
            tensor[-1, -1] = float("nan")
    with pytest.raises(PolicyDiverged, match=r"layers\.1\.self_attn\.qkv_proj\.weight; the policy"):
        engine.commit_update()
    with pytest.raises(UsageError, match="is open"):
        engine.step()


def test_diverged_weights_are_an_error_and_the_engine_recovers():
    engine = make_engine("llama", dtype=torch.float32)
    requests = make_requests(prompts=1, samples=2)
    good = engine.generate(requests)
    weights = weights_of("llama")
    huge = weights["lm_head.weight"] * 1e38
    engine.load_from_state_dict(weights | {"lm_head.weight": huge}, version=1)
    with pytest.raises(PolicyDiverged, match="version=1 give logits that are not finite"):
        engine.generate(requests)
    assert engine.num_in_flight == 0
    engine.load_from_state_dict(weights_of("llama"), version=2)
    same(engine.generate(requests), good, atol=1e-5)


def test_a_tied_head_follows_an_update_of_the_embedding_alone():
    """As a model does whose head is given apart, and whose head gets the new embedding too."""
    name = "model.embed_tokens.weight"
    weights = {n: tensor for n, tensor in weights_of("llama-tied").items() if n != "lm_head.weight"}
    new = weights | {name: weights_of("llama-tied", seed=1)[name]}
    tied, apart = make_engine("llama-tied"), empty_engine(LLAMA)
    apart.load_from_state_dict(new | {"lm_head.weight": new[name]})
    requests = make_requests(temperature=0.8)
    before = tied.generate(requests)
    tied.load_from_state_dict(new, version=1)
    after = tied.generate(requests)
    same(after, apart.generate(requests))
    assert [c.full_T for c in after] != [c.full_T for c in before]


def test_a_state_dict_that_does_not_fit_is_refused_with_all_faults():
    engine = empty_engine(hf.load_config(model_folder("llama-tied")))
    weights = dict(weights_of("llama-tied"))
    assert "lm_head.weight" in weights, "transformers lists the tied head too"
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    weights["model.layers.0.extra.weight"] = weights.pop("model.norm.weight")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    with pytest.raises(ModelError) as caught:
        engine.load_from_state_dict(weights)
    for fault in (
        "4 faults",
        "lm_head.weight differs from the embedding",
        "missing: model.norm.weight",
        "unexpected: model.layers.0.extra.weight",
        "mlp.up_proj.weight is (2, 2), it must be (48, 32)",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "index=1.*prompt_ids is empty"),
        ({"prompt_ids": (1, VOCAB)}, f"index=1.*holds {VOCAB}, outside the vocabulary of {VOCAB}"),
        ({"prompt_ids": (-1,)}, "index=1.*holds -1"),
        ({"stop_token_ids": (99,)}, "index=1.*stop_token_ids holds 99"),
        ({"max_tokens": CONTEXT}, f"index=1.*max_tokens={CONTEXT} exceed the context of {CONTEXT}"),
        ({"prompt_ids": (1,) * 70}, "70 prompt tokens.*max_tokens to at most 0"),
        ({"index": 0}, "index=0.*in flight already"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_anything_runs(change, message):
    def request(**change) -> Request:
        return Request(
            prompt_ids=change.get("prompt_ids", (1, 2, 3)),
            sampling=Sampling(
                max_tokens=change.get("max_tokens", 4),
                stop_token_ids=change.get("stop_token_ids", ()),
            ),
            sample_id=SampleId(prompt_uid="p", index=change.get("index", 1)),
            seed=0,
        )

    engine = make_engine("llama")
    with pytest.raises(UsageError, match=message):
        engine.generate([request(index=0), request(**change)])
    assert (engine.num_in_flight, engine.num_steps) == (0, 0)
    assert len(engine.generate([request()])) == 1


def test_the_whole_context_can_be_used_and_no_more():
    engine = make_engine("qwen3", max_model_len=20)
    exact = Request(
        prompt_ids=(1,) * 12,
        sampling=Sampling(max_tokens=8, temperature=0.0),
        sample_id=SampleId(prompt_uid="p", index=0),
        seed=0,
    )
    (completion,) = engine.generate([exact])
    expected = logprobs_by_transformers(transformers_model("qwen3"), completion)
    assert completion.full_T == pytest.approx(expected, abs=1e-12)
    with pytest.raises(UsageError, match=f"max_model_len={CONTEXT + 1}.*={CONTEXT}"):
        make_engine("qwen3", max_model_len=CONTEXT + 1)
    with pytest.raises(UsageError, match="max_slots=0"):
        make_engine("qwen3", max_slots=0)


def test_a_layout_of_other_tensors_is_refused():
    with pytest.raises(PlanError, match=r"qkv_proj\.bias"):
        empty_engine(hf.load_config(model_folder("qwen2")), layout=empty_engine(LLAMA).layout())


def test_long_queues_are_prefilled_in_bounded_batches(monkeypatch):
    requests = make_requests(prompts=6, samples=2, max_tokens=3)
    expected = make_engine("llama").generate(requests)
    monkeypatch.setattr("shardloop.engines.runner.PREFILL_TOKENS", 20)
    same(make_engine("llama").generate(requests), expected)
