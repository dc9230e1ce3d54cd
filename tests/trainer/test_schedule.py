"""The learning rate at every step."""

import pytest

from shardloop.config import OptimConfig
from shardloop.schedule import learning_rate


def test_warm_up_then_constant() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(step, 7, optim) for step in range(7)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_cosine_goes_from_the_peak_to_a_tenth_of_it() -> None:
    optim = OptimConfig(lr=2.0, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(step, 11, optim) for step in range(11)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.1)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_runs_shorter_than_the_warm_up_have_a_rate(total) -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=2, schedule="cosine")
    assert all(0.0 < learning_rate(step, total, optim) <= 1.0 for step in range(total))


@pytest.mark.parametrize("total", [2, 3, 8])
def test_the_last_step_of_a_cosine_has_a_tenth_even_right_after_the_warm_up(total) -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=total - 1, schedule="cosine")
    assert learning_rate(total - 2, total, optim) == 1.0
    assert learning_rate(total - 1, total, optim) == pytest.approx(0.1)


def test_a_run_of_one_step_has_the_peak() -> None:
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup_steps=0, schedule="cosine")) == 1.0


def test_a_step_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step=5; choose a step in \[0, 5\)"):
        learning_rate(5, 5, OptimConfig())
