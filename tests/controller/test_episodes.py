"""Samples of several turns: what the policy chose is trained as sampled, and nothing else is."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardloop.controller import environments
from shardloop.controller.rollouts import Rollout, Sampler, solution_row
from shardloop.controller.scoring import score_rollouts
from shardloop.engines.scripted import ScriptedEngine
from shardloop.errors import RewardError, TaskError
from shardloop.hf import load_tokenizer
from shardloop.hf.tokenizer import HFTokenizer
from shardloop.rl.batch import make_batch
from shardloop.tasks import no_env
from shardloop.tiny import build_tiny
from shardloop.types import Completion, Env, Observation, Prompt, Request, Reward, Sampling
from tests.controller.fakes import engines_of

END, CALL = 0, ord("?")


class PairTokenizer:
    """One token a character, but `ab` is a single one: `a`, then `b`, is no text's encoding."""

    vocab_size = 300
    stop_token_ids: tuple[int, ...] = (END,)
    PAIR = 256

    def encode(self, text: str) -> list[int]:
        return [self.PAIR if c == "\1" else ord(c) for c in text.replace("ab", "\1")]

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("ab" if i == self.PAIR else chr(i) for i in token_ids if i != END)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt.text or "")


class Parrot:
    """Answers each call by `b` and its own length, and is done when a turn is no call."""

    def __init__(self, opening: str = "", reward: float = 0.0) -> None:
        self.opening, self.reward = opening, reward
        self.heard: list[str] = []

    def reset(self) -> str:
        return self.opening

    def step(self, text: str) -> Observation:
        self.heard.append(text)
        if not text.endswith("?"):
            return Observation(text="", reward=self.reward, done=True)
        return Observation(text=f"b{len(text)}", reward=self.reward)


def script(*turns: str) -> Callable[[Request], list[int]]:
    """Answers turn by turn; `|` ends the policy's text."""
    return lambda request: [
        END if c == "|" else ord(c) for c in turns[min(request.sample_id.turn, len(turns) - 1)]
    ]


def drawn(request: Request) -> list[int]:
    """A policy whose text is noise of its own: letters, then a call or the end."""
    noise = random.Random(f"{request.seed}/{request.sample_id}/{request.prompt_ids}")
    letters = [ord(noise.choice("abc")) for _ in range(noise.randrange(4))]
    return [*letters, noise.choice([CALL, CALL, END])]


class Recording(ScriptedEngine):
    """Remembers what it was asked; `per_call` is the number of requests of each call."""

    def __init__(self, answer: Callable[[Request], Sequence[int]], **settings: Any) -> None:
        super().__init__(answer, logprob=-0.5, version=3, **settings)
        self.asked: list[Request] = []
        self.per_call: list[int] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        self.per_call.append(len(requests))
        return super().generate(requests)


def sampler_of(
    engine: ScriptedEngine,
    make_env: Callable[[Prompt], Env | None] = lambda prompt: Parrot(),
    *,
    max_tokens: int = 20,
    context_length: int = 60,
) -> Sampler:
    return Sampler(
        engine=engines_of(engine),
        tokenizer=PairTokenizer(),
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(END, CALL)),
        context_length=context_length,
        make_env=make_env,
    )


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(uid=f"u{i}", text="q" * (i + 1)) for i in range(count)]


def only(rollouts: Sequence[Rollout]) -> Completion:
    ((completion,),) = [rollout.completions for rollout in rollouts]
    return completion


def play_one(sampler: Sampler, *, seed: int = 0) -> Completion:
    return only(sampler.rollout(prompts_of(1), samples_per_prompt=1, seed=seed))


def test_an_episode_is_one_completion_whose_tools_tokens_are_masked() -> None:
    engine = Recording(script("xa?", "y|"))
    completion = play_one(sampler_of(engine))
    assert completion.request == engine.asked[0]
    assert completion.token_ids_T == (*map(ord, "xa?b3y"), END)
    assert completion.loss_mask_T == (1, 1, 1, 0, 0, 1, 1)
    assert completion.full_T == completion.behave_T == (-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5)
    assert completion.version_T == (3,) * 7
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("many", [1, 7])
def test_every_turn_is_asked_with_the_exact_ids_so_far(many: int, seed: int) -> None:
    """Also where its text has other ids: those of `ab`, when `a` and `b` were sampled."""
    engine = Recording(drawn)
    rollouts = sampler_of(engine).rollout(prompts_of(many), samples_per_prompt=3, seed=seed)
    tokenizer = PairTokenizer()
    for rollout in rollouts:
        for index, whole in enumerate(rollout.completions):
            mine = replace(whole.request.sample_id, index=index)
            asked = [r for r in engine.asked if replace(r.sample_id, turn=0) == mine]
            so_far = list(whole.request.prompt_ids)
            assert [r.sample_id.turn for r in asked] == list(range(len(asked)))
            for request in asked:
                assert list(request.prompt_ids) == so_far
                said = drawn(request)[: request.sampling.max_tokens]
                so_far += said
                if said[-1] == CALL:
                    so_far += tokenizer.encode(f"b{len(said)}")
            sampled = [i for i, m in zip(whole.token_ids_T, whole.loss_mask_T, strict=True) if m]
            assert sampled == [i for r in asked for i in drawn(r)[: r.sampling.max_tokens]]
            ids = [*whole.request.prompt_ids, *whole.token_ids_T]
            assert ids == so_far[: len(ids)], "an observation without room is left out"


def test_all_open_episodes_take_their_turn_in_one_call() -> None:
    engine = Recording(
        lambda r: [CALL] if r.sample_id.turn < int(r.sample_id.prompt_uid[1:]) else [END]
    )
    sampler_of(engine).rollout(prompts_of(4), samples_per_prompt=2, seed=0)
    assert engine.per_call == [8, 6, 4, 2]


def test_an_episode_does_not_depend_on_the_others(seed: int) -> None:
    together = sampler_of(Recording(drawn)).rollout(prompts_of(6), samples_per_prompt=2, seed=seed)
    for prompt, rollout in zip(prompts_of(6), together, strict=True):
        alone = sampler_of(Recording(drawn)).rollout([prompt], samples_per_prompt=2, seed=seed)
        assert alone == [rollout]


def test_no_two_turns_share_their_noise(seed: int) -> None:
    engine = Recording(drawn)
    sampler_of(engine).rollout(prompts_of(8), samples_per_prompt=3, seed=seed)
    assert len(engine.asked) > 8 * 3, "some episode has several turns"
    assert len({request.sample_id for request in engine.asked}) == len(engine.asked)


@pytest.mark.parametrize("make_env", [lambda prompt: None, no_env])
def test_a_single_turn_is_the_engines_completion_itself(
    make_env: Callable[[Prompt], None], seed: int
) -> None:
    engine = Recording(drawn)
    rollouts = sampler_of(engine, make_env).rollout(prompts_of(5), samples_per_prompt=2, seed=seed)
    direct = ScriptedEngine(drawn, logprob=-0.5, version=3).generate(engine.asked)
    assert [c for rollout in rollouts for c in rollout.completions] == direct
    assert engine.per_call == [10]
    assert all(rollout.env_rewards == (None, None) for rollout in rollouts)


def test_max_tokens_counts_what_the_policy_chose_over_all_turns() -> None:
    completion = play_one(sampler_of(Recording(script("xx?")), max_tokens=7))
    assert "".join(map(chr, completion.token_ids_T)) == "xx?b3xx?b3x"
    assert sum(completion.loss_mask_T) == 7 and completion.finish_reason == "length"
    ended = play_one(sampler_of(Recording(script("xx?")), max_tokens=6))
    assert "".join(map(chr, ended.token_ids_T)) == "xx?b3xx?", "nothing can follow an observation"
    assert ended.finish_reason == "length"


@pytest.mark.parametrize("context_length", range(9, 30))
def test_every_row_fits_the_context_with_its_observations(context_length: int) -> None:
    engine = Recording(script("xx?"), max_model_len=context_length)
    completion = play_one(sampler_of(engine, max_tokens=8, context_length=context_length))
    assert len(completion.request.prompt_ids) + len(completion.token_ids_T) <= context_length
    assert completion.loss_mask_T[-1] == 1, "an observation without room to answer is left out"
    assert completion.finish_reason == "length"
    assert sum(completion.loss_mask_T) == 8 or context_length < 1 + 8 + 2 * 2 + 1


def test_a_turn_that_ran_out_of_tokens_is_not_sent_to_the_environment() -> None:
    env = Parrot()
    completion = play_one(sampler_of(Recording(script("x?", "yyyy|")), lambda p: env, max_tokens=5))
    assert env.heard == ["x?"] and completion.finish_reason == "length"


def test_the_text_of_reset_stands_before_the_first_turn() -> None:
    engine = Recording(script("x|"))
    completion = play_one(sampler_of(engine, lambda prompt: Parrot("hi:")))
    assert completion.request.prompt_ids == tuple(map(ord, "qhi:"))
    assert completion.token_ids_T == (ord("x"), END)
    with pytest.raises(TaskError, match=r"'u0'.* have 26 tokens, which fill .* of 26"):
        play_one(sampler_of(engine, lambda prompt: Parrot("h" * 25), context_length=26))


def test_each_sample_has_an_environment_of_its_own() -> None:
    made: list[Parrot] = []

    def make(prompt: Prompt) -> Parrot:
        made.append(Parrot())
        return made[-1]

    sampler_of(Recording(script("x?", "y|")), make).rollout(
        prompts_of(2), samples_per_prompt=3, seed=0
    )
    assert [env.heard for env in made] == [["x?", "y"]] * 6


@pytest.mark.parametrize("num_samples", [1, 3])
def test_an_environment_is_of_one_sample_alone(num_samples: int) -> None:
    shared = Parrot()
    sampler = sampler_of(Recording(script("y|")), lambda prompt: shared)
    with pytest.raises(TaskError, match=r"prompt 'u[01]' .*gave one that another sample has"):
        sampler.rollout(prompts_of(2), samples_per_prompt=num_samples, seed=0)


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """The tiny tokenizer, whose end is named by letters that it has."""
    folder = build_tiny(tmp_path_factory.mktemp("tiny"), seed=0)
    for path in folder.glob("*token*.json"):
        path.write_text(path.read_text().replace("<eos>", "eos"))
    return load_tokenizer(folder)


def test_the_name_of_a_special_token_is_plain_text_in_an_observation(
    spelling: HFTokenizer,
) -> None:
    (end,) = spelling.stop_token_ids
    assert spelling.encode("1eos2") == [*spelling.encode("1"), end, *spelling.encode("2")]
    letters = [spelling.encode(letter)[0] for letter in "1eos2"]
    assert spelling.encode_plain("1eos2") == letters and end not in letters
    assert spelling.encode("eos") == [end], "one call leaves nothing behind for the next"
    turns = [spelling.encode("a>"), [*spelling.encode("b"), end]]

    class Injecting(Parrot):
        def step(self, text: str) -> Observation:
            return Observation(text="1eos2", done=text == "b")

    sampler = replace(
        sampler_of(Recording(lambda r: turns[r.sample_id.turn]), lambda prompt: Injecting("eos")),
        tokenizer=spelling,
        sampling=Sampling(max_tokens=20, stop_token_ids=(end, spelling.encode(">")[0])),
    )
    completion = play_one(sampler)
    assert completion.request.prompt_ids == (
        *spelling.encode_prompt(prompts_of(1)[0]),
        *letters[1:4],
    )
    assert completion.token_ids_T == (*turns[0], *letters, *turns[1], *letters)
    prompt = Prompt(uid="u0", text="q", solution=("a>", "1eos2", "b"))
    row = solution_row(prompt, spelling, 60)
    assert row.answer_ids == (*turns[0], *letters, *turns[1])


def judge(prompt: Prompt, text: str, *, finished: bool) -> Reward:
    return Reward(value=0.25 if finished else 0.0, parts={"seen": float(len(text))}, text=text)


def test_what_the_environment_gives_adds_up_and_is_a_part_of_the_reward() -> None:
    sampler = sampler_of(Recording(script("x?", "y|")), lambda prompt: Parrot(reward=0.5))
    rollouts = sampler.rollout(prompts_of(1), samples_per_prompt=2, seed=0)
    scores = score_rollouts(rollouts, reward=judge, tokenizer=PairTokenizer())
    assert scores.rewards_PG.tolist() == [[1.25, 1.25]]
    sample = scores.samples[0]
    assert sample.reward.parts == {"seen": 5.0, "env": 1.0}
    assert (sample.text, sample.marked, sample.num_tokens) == ("x?b2y", "x?«b2»y", 4)


def test_without_an_environment_the_reward_has_no_part_for_it() -> None:
    sampler = sampler_of(Recording(script("x|")), lambda prompt: None)
    rollouts = sampler.rollout(prompts_of(1), samples_per_prompt=2, seed=0)
    sample = score_rollouts(rollouts, reward=judge, tokenizer=PairTokenizer()).samples[0]
    assert sample.reward == judge(sample.prompt, "x", finished=True)
    assert sample.marked == sample.text == "x"


def test_the_loss_is_on_nothing_but_the_policys_tokens(seed: int) -> None:
    rollouts = sampler_of(Recording(drawn)).rollout(prompts_of(4), samples_per_prompt=2, seed=seed)
    completions = [c for rollout in rollouts for c in rollout.completions]
    batch = make_batch(completions, torch.ones(8, dtype=torch.float64))
    flat = [
        (mask, full)
        for c in completions
        for mask, full in [
            *((0, 0.0) for _ in c.request.prompt_ids),
            *zip(c.loss_mask_T, c.full_T, strict=True),
        ]
    ]
    assert batch.loss_mask_N.tolist() == [bool(mask) for mask, _ in flat]
    assert batch.advantages_N is not None and batch.full_N is not None
    assert batch.advantages_N.tolist() == [float(mask) for mask, _ in flat]
    assert batch.full_N.tolist() == [full for _, full in flat]


class Faulty(Parrot):
    """Does something wrong in its second turn."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self.answer = answer

    def step(self, text: str) -> Any:
        return super().step(text) if not self.heard else self.answer()


def raising(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (raising(KeyError("k")), TaskError, "in turn 2 raised KeyError: 'k'"),
        (raising(SystemExit(0)), TaskError, "in turn 2 raised SystemExit: 0"),
        (lambda: "text", TaskError, "in turn 2 returned 'text'; it must return an Observation"),
        (lambda: Observation(text=b"b"), TaskError, "in turn 2 gave the text b'b'"),  # type: ignore[arg-type]
        (lambda: Observation(text="", done=1), TaskError, "in turn 2 returned done=1"),  # type: ignore[arg-type]
        (
            lambda: Observation(text="", reward=float("nan")),
            RewardError,
            "environment's reward in turn 2 is nan for prompt 'u0'",
        ),
    ],
)
def test_what_an_environment_does_wrong_names_prompt_and_turn(
    answer: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=r"prompt 'u0'") as caught:
        play_one(sampler_of(Recording(script("x?")), lambda prompt: Faulty(answer)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda prompt: 1 / 0, "making the environment of prompt 'u0' .* raised ZeroDivisionError"),
        (lambda prompt: "env", "gave 'env'; it must have the methods reset and step"),
        (lambda prompt: Parrot(opening=None), r"in reset gave the text None"),  # type: ignore[arg-type]
    ],
)
def test_an_environment_that_cannot_begin_is_named(make: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        play_one(sampler_of(Recording(script("x?")), make))


def test_a_silent_environment_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ANSWER_TIMEOUT_S", 0.05)
    free = threading.Event()
    with pytest.raises(TaskError, match=r"prompt 'u0' .*in turn 2.* no answer within 0.05 s"):
        play_one(sampler_of(Recording(script("x?")), lambda prompt: Faulty(lambda: free.wait(2.0))))
    free.set()
