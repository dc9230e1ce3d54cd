"""Trainer and engine give every token the same log-prob, bit for bit, and the right one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardloop import hf
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.invariant import InvariantPolicy
from shardloop.model import DecoderConfig, PromptAttention
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor
from shardloop.policy import Policy
from shardloop.rl.batch import Batch, make_batch
from shardloop.rl.packing import pack, plan_packing
from shardloop.trainer import Trainer
from shardloop.types import Completion, Request, SampleId, Sampling
from tests.engines.models import (
    CONTEXT,
    KINDS,
    VOCAB,
    empty_engine,
    make_engine,
    model_folder,
    weights_of,
)
from tests.harness import run_ranks

DTYPES = (torch.float32, torch.float64)
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12}


def random_requests(seed: int, *, temperature: float, count: int = 7) -> list[Request]:
    """Prompts of any length, some shared, some completions longer than others."""
    rng = random.Random(seed)
    prompts = [
        tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
        for _ in range(-(-count // 2))
    ]
    return [
        Request(
            prompt_ids=rng.choice(prompts),
            sampling=Sampling(max_tokens=rng.randint(1, CONTEXT - 40), temperature=temperature),
            sample_id=SampleId(prompt_uid="p", index=index),
            seed=seed,
        )
        for index in range(count)
    ]


def make_policy(kind: str, dtype: torch.dtype, *, seed: int = 0) -> InvariantPolicy:
    folder = model_folder(kind, seed)
    config = DecoderConfig.from_hf(hf.load_config(folder))
    return InvariantPolicy(hf.load_model(folder, dtype=dtype), config, tp_size=1, dtype=dtype)


def score(
    policy: Policy, batch: Batch, *, row_tokens: int, rows: int, num_ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] of a batch packed in one of many ways; differentiable."""
    packing = plan_packing(
        batch.lengths, row_tokens=row_tokens, rows_per_micro_batch=rows, num_ranks=num_ranks
    )
    found_2N = torch.zeros(2, len(batch.token_ids_N), dtype=next(policy.parameters()).dtype)
    for rank in range(num_ranks):
        for micro_batch in packing.micro_batches(rank):
            packed = pack(batch, micro_batch)
            values = policy(
                packed.input_ids_BT,
                packed.position_ids_BT,
                packed.segment_ids_BT,
                packed.target_positions_n,
                packed.target_ids_n,
                temperature=batch.temperature,
            )
            found_2N = found_2N.index_add(1, packed.flat_index_n, torch.stack(values))
    return found_2N[0], found_2N[1]


def batch_of(completions: Sequence[Completion]) -> Batch:
    return make_batch(completions, torch.zeros(len(completions), dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gap_is_zero_for_any_slots_prompts_and_packing(seed, kind, dtype) -> None:
    policy = make_policy(kind, dtype)
    for case, (max_slots, temperature) in enumerate(((1, 1.0), (4, 0.37))):
        engine = make_engine(kind, dtype=dtype, max_slots=max_slots, kernels="invariant")
        batch = batch_of(engine.generate(random_requests(seed + case, temperature=temperature)))
        for row_tokens, rows, num_ranks in ((64, 1, 1), (100, 3, 2), (64, 8, 12)):
            with torch.no_grad():
                found_N, _ = score(
                    policy, batch, row_tokens=row_tokens, rows=rows, num_ranks=num_ranks
                )
            assert torch.equal(found_N.double(), batch.full_N), (max_slots, row_tokens)
            assert torch.equal(batch.behave_N, batch.full_N)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_gap_values_are_those_of_the_other_implementations(seed, kind, dtype) -> None:
    engine = make_engine(kind, dtype=dtype, max_slots=4, kernels="invariant")
    completions = engine.generate(random_requests(seed, temperature=0.6))
    decoder = make_engine(kind, dtype=dtype)._decoder
    for completion in completions:
        ids = torch.tensor([[*completion.request.prompt_ids, *completion.token_ids_T]])
        hidden = decoder(
            ids,
            positions_BT=torch.arange(ids.shape[1])[None],
            num_positions=ids.shape[1],
            history=PromptAttention(),
        )
        table = torch.log_softmax(decoder.logits(hidden)[0].double() / 0.6, -1)
        num_new = len(completion.token_ids_T)
        wanted = table[-num_new - 1 : -1].gather(1, ids[0, -num_new:, None])[:, 0]
        found = torch.tensor(completion.full_T, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND[dtype])
    batch = batch_of(completions)
    fast = Policy(hf.load_model(model_folder(kind), dtype=dtype))
    with torch.no_grad():
        for values in zip(
            score(make_policy(kind, dtype), batch, row_tokens=90, rows=2),
            score(fast, batch, row_tokens=90, rows=2),
            strict=True,
        ):
            torch.testing.assert_close(*values, rtol=0, atol=BOUND[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_fast_path(seed, kind) -> None:
    engine = make_engine(kind, kernels="invariant")
    batch = batch_of(engine.generate(random_requests(seed, temperature=0.8)))
    gradients = []
    fast = Policy(hf.load_model(model_folder(kind), dtype=torch.float64))
    for policy in (make_policy(kind, torch.float64), fast):
        logprobs_N, entropy_N = score(policy, batch, row_tokens=90, rows=2)
        (logprobs_N.exp().mean() + entropy_N.square().mean()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gap_is_zero_on_both_sides_of_an_update_in_flight(seed, dtype) -> None:
    engine = make_engine("qwen3", dtype=dtype, max_slots=4, kernels="invariant")
    requests = random_requests(seed, temperature=1.0)
    engine.submit(requests)
    done = [completion for _ in range(6) for completion in engine.step()]
    engine.load_from_state_dict(weights_of("qwen3", 1), version=1)
    while engine.num_in_flight:
        done += engine.step()
    versions = {version for completion in done for version in completion.version_T}
    assert versions == {0, 1}
    batch = batch_of(done)
    version_N = torch.full_like(batch.token_ids_N, -1)
    version_N[batch.loss_mask_N] = torch.tensor([v for c in done for v in c.version_T])
    for version in versions:
        with torch.no_grad():
            policy = make_policy("qwen3", dtype, seed=version)
            found_N, _ = score(policy, batch, row_tokens=100, rows=3)
        of_it = version_N == version
        assert torch.equal(found_N.double()[of_it], batch.full_N[of_it])


def train_and_sample(context: RankContext, folder: Path, layout: str, dtype: str) -> list[Any]:
    """Gaps before and after an update of the weights, which the engine takes over."""
    config = TrainerConfig(layout=layout, dtype=dtype, row_tokens=70, rows_per_micro_batch=2)
    trainer = Trainer(
        context,
        model_dir=folder,
        config=config,
        optim=OptimConfig(),
        reference=False,
        role="all",
        kernels="invariant",
    )
    engine = empty_engine(
        hf.load_config(folder), dtype=getattr(torch, dtype), max_slots=5, kernels="invariant"
    )
    results = []
    for version in range(2):
        weights = {name: full_tensor(w) for name, w in trainer._policy.named_parameters()}
        engine.load_from_state_dict(weights, version=version)
        requests = random_requests(version, temperature=0.9, count=5 if version else 1)
        batch = batch_of(engine.generate(requests))
        old_N = trainer.logprobs(batch)
        dist.all_reduce(old_N)
        results.append((old_N.double(), batch.full_N))
        trainer.forward_backward(batch, "sft")
        trainer.step(0.01)
    return results


@pytest.mark.parametrize(
    ("layout", "num_ranks", "dtype"),
    [("fsdp=1", 1, "float32"), ("fsdp=2", 2, "float32"), ("fsdp=2", 2, "float64")],
)
def test_the_gap_is_zero_over_trainer_ranks_and_updates(layout, num_ranks, dtype) -> None:
    # The first batch has one sequence: of two ranks, one has padding only.
    by_rank = run_ranks(train_and_sample, num_ranks, model_folder("qwen3-tied"), layout, dtype)
    for results in by_rank:
        for old_N, full_N in results:
            assert (full_N < 0).any()
            assert torch.equal(old_N, full_N)
