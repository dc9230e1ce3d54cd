"""Tasks of reasoning-gym: with the extra, and without it."""

import json
import sys

import pytest

from shardloop.errors import UsageError
from shardloop.rewards import load_reward, score
from shardloop.tasks import evaluation_prompts, load_task
from shardloop.tasks.gym import gym_dataset


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    gym_dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"task gym:gcd: .*pip install 'shardloop\[gym\]'"):
        load_task("gym:gcd")


@pytest.mark.optional
def test_gym_questions_are_disjoint_scored_and_plain_data() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task("gym:gcd")
    train = task.prompts("train", seed=0, start=7, count=60)
    assert task.prompts("train", seed=0, start=17, count=50) == train[10:]
    test = evaluation_prompts(task, count=60)
    assert not {str(p.messages) for p in train} & {str(p.messages) for p in test}
    reward = load_reward(task.default_reward, task=task)
    for prompt in train[:5]:
        assert json.loads(json.dumps(prompt.answer)) == prompt.answer
        right = gym_dataset("gcd")[prompt.answer["index"]]["answer"]
        assert score(reward, prompt, right, finished=True).value == 1.0
        assert score(reward, prompt, right, finished=False).value == 0.0
        assert score(reward, prompt, "none", finished=True).value < 1.0


@pytest.mark.optional
def test_an_unknown_generator_lists_near_names() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UsageError, match=r"no such reasoning-gym generator; near it: .*countdown"):
        load_task("gym:count_down")
