"""The engine on real gloo ranks."""

import pytest
import torch

from shardloop import hf
from shardloop.parallel.tp import ProcessGroupTP
from tests.engines.models import (
    empty_engine,
    make_engine,
    make_requests,
    model_folder,
    weights_of,
)
from tests.harness import run_ranks

REQUESTS = make_requests(max_tokens=8, top_p=0.95, stop_token_ids=(3,))


def generate_on_rank(context, config, weights):
    engine = empty_engine(config, comm=ProcessGroupTP(context.group("all")), max_slots=5)
    engine.load_from_state_dict(weights)
    return engine.generate(REQUESTS)


def collectives_on_rank(context):
    comm = ProcessGroupTP(context.group("all"))
    x = torch.arange(6.0).view(2, 3) + 100 * comm.rank
    return comm.all_gather_last_dim(x.t()), comm.all_reduce(x.t())


def test_completions_on_gloo_ranks_equal_those_of_one_process():
    whole = make_engine("qwen3-tied", max_slots=5).generate(REQUESTS)
    config = hf.load_config(model_folder("qwen3-tied"))
    for cut in run_ranks(generate_on_rank, 2, config, weights_of("qwen3-tied")):
        for ours, theirs in zip(cut, whole, strict=True):
            assert ours.token_ids_T == theirs.token_ids_T
            assert ours.full_T == pytest.approx(theirs.full_T, abs=1e-12, rel=0)
            assert ours.behave_T == pytest.approx(theirs.behave_T, abs=1e-12, rel=0)


def test_collectives_place_and_sum_by_rank_even_for_strided_tensors():
    x = torch.arange(6.0).view(2, 3).t()
    for gathered, reduced in run_ranks(collectives_on_rank, 2):
        assert torch.equal(gathered, torch.cat((x, x + 100), dim=-1))
        assert torch.equal(reduced, 2 * x + 100)
