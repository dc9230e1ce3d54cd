"""Calls of a task's environments, which are the user's code: watched, and checked. Floor 4.

Called by `controller.rollouts` and `controller.trials`. Whatever an environment does wrong ends
the run as an error that names the prompt and the turn; nothing it does makes the run wait for ever.

    driver ──call──▶ one thread ──▶ reset, step        (all environments of a rollout, in order)
       └── waits at most ANSWER_TIMEOUT_S
"""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Self

from shardloop.errors import RewardError, TaskError
from shardloop.rewards import finite_number
from shardloop.tasks import no_env
from shardloop.types import Env, Observation, Prompt
from shardloop.usercode import shown, told

ANSWER_TIMEOUT_S = 300.0
"""Longest wait for one call of an environment."""


class CallingThread:
    """Runs functions one after the other in a thread of its own; a context manager that ends it.

    A function that does not return leaves the thread behind, which the end of the process does not
    wait for.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="environments", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns or raises.

        Raises:
            TimeoutError: it took longer than `ANSWER_TIMEOUT_S`; nothing can be called any more.
        """
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                answer.put((function(*args), None))
            except BaseException as error:  # raised again by the caller, which waits for it
                answer.put((None, error))

        self._calls.put(run)
        try:
            value, error = answer.get(timeout=ANSWER_TIMEOUT_S)
        except Empty:
            raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None
        if error is not None:
            raise error
        return value

    def _serve(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


class GuardedEnv:
    """One environment of the user's. Turns are counted from 1 in messages."""

    def __init__(self, env: Env, prompt: Prompt, thread: CallingThread) -> None:
        self._env, self._prompt, self._thread = env, prompt, thread

    def reset(self) -> str:
        """
        Raises:
            TaskError: it raised, kept silent, or returned no text.
        """
        text = _called(self._thread, self._env.reset, (), self._where("in reset"))
        return _text(text, self._where("in reset"))

    def step(self, text: str, *, turn: int) -> Observation:
        """
        Raises:
            TaskError: as `reset`, or it returned no Observation of text and a true or false `done`.
            RewardError: the reward is no finite number of sane size.
        """
        where = self._where(f"in turn {turn + 1}")
        seen = _called(self._thread, self._env.step, (text,), where)
        if not isinstance(seen, Observation):
            raise TaskError(f"{where} returned {shown(seen)}; it must return an Observation")
        if not isinstance(seen.done, bool):
            raise TaskError(f"{where} returned done={shown(seen.done)}; it must be True or False")
        what = f"the environment's reward in turn {turn + 1}"
        reward = finite_number(seen.reward, what, self._prompt)
        return Observation(text=_text(seen.text, where), reward=reward, done=seen.done)

    def _where(self, when: str) -> str:
        return f"the environment of {self._prompt.named} {when}"


def guarded(
    make: Callable[[Prompt], Env | None], prompts: Sequence[Prompt], thread: CallingThread
) -> list[GuardedEnv | None]:
    """A new environment for each sample; None where it has a single turn.

    Args:
        prompts: of each sample.
    Raises:
        TaskError: `make` raised, kept silent, or returned something without reset and step, or the
            environment of another sample.
    """
    if make is no_env:
        return [None] * len(prompts)
    envs = [_made(make, prompt, thread) for prompt in prompts]
    seen: set[int] = set()
    for env, prompt in zip(envs, prompts, strict=True):
        if env is not None and id(env) in seen:
            raise TaskError(
                f"{_making(prompt)} gave one that another sample has; make a new one at each call: "
                "what one sample does must not reach another"
            )
        seen.add(id(env))
    return [
        None if env is None else GuardedEnv(env, prompt, thread)
        for env, prompt in zip(envs, prompts, strict=True)
    ]


def _made(
    make: Callable[[Prompt], Env | None], prompt: Prompt, thread: CallingThread
) -> Env | None:
    def parts() -> tuple[Env | None, bool]:
        env = make(prompt)
        return env, all(callable(getattr(env, name, None)) for name in ("reset", "step"))

    env, is_env = _called(thread, parts, (), _making(prompt))
    if env is not None and not is_env:
        raise TaskError(
            f"{_making(prompt)} gave {shown(env)}; it must have the methods reset and step"
        )
    return env


def _making(prompt: Prompt) -> str:
    return f"making the environment of {prompt.named}"


def _called(
    thread: CallingThread, function: Callable[..., Any], args: tuple[Any, ...], where: str
) -> Any:
    try:
        return thread.call(function, *args)
    except (TaskError, RewardError) as error:
        raise type(error)(f"{where}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an environment is the user's code and may raise anything
        raise TaskError(f"{where} raised {told(error)}") from error


def _text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise TaskError(f"{where} gave the text {shown(text)}; it must be a str")
    return text
