"""Stop texts: the token that completes one ends the completion, wherever its characters lie."""

import itertools
import random

import pytest

from shardloop.engines.stops import StopTexts
from shardloop.errors import UsageError
from shardloop.types import Request, SampleId, Sampling
from tests.engines.models import VOCAB, make_engine, make_requests, run_threads

LETTERS = "ab\n#é 日🙂"


def byte_pieces(seed: int) -> list[bytes]:
    """A byte-level vocabulary: every byte of a few characters, and merges of up to 7 bytes."""
    rng, raw = random.Random(seed), LETTERS.encode()
    singles = [bytes([value]) for value in sorted(set(raw))]
    text = "".join(rng.choices(LETTERS, k=200)).encode()
    starts = rng.sample(range(len(text) - 8), 25)
    return singles + [text[start : start + rng.randint(2, 7)] for start in starts]


def decoder(pieces: list[bytes]):
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def request_with(*texts: str) -> Request:
    return Request(
        prompt_ids=(0,),
        sampling=Sampling(max_tokens=100, stop=texts),
        sample_id=SampleId(prompt_uid="p", index=0),
        seed=0,
    )


@pytest.mark.parametrize("texts", [("a",), ("é",), ("🙂", "日a"), ("ab", "\n\n#"), (" 日🙂#a",)])
def test_tail_checks_find_what_the_whole_text_shows(texts, seed):
    rng, pieces = random.Random(seed), byte_pieces(seed)
    stops, request = StopTexts(decoder(pieces)), request_with(*texts)
    num_found = 0
    for _ in range(60):
        ids: list[int] = []
        for _ in range(80):
            ids.append(rng.randrange(len(pieces)))
            whole = any(text in decoder(pieces)(ids) for text in texts)
            assert stops.completed(request, ids) == whole, (ids, texts)
            if whole:
                num_found += 1
                break
    assert num_found > 0 or len(texts[0]) > 4


def fallback_decoder(pieces: list[str | int]):
    """As tokenizers that fall back to bytes: all bytes in a row are text, or none of them is."""

    def decode(ids) -> str:
        text = ""
        for is_byte, group in itertools.groupby((pieces[i] for i in ids), lambda p: type(p) is int):
            parts = list(group)
            raw = bytes(parts) if is_byte else "".join(parts).encode()
            try:
                text += raw.decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(raw)
        return text

    return decode


@pytest.mark.parametrize("letters", ["🙂🙃", "🙂日a", "ab🙂", "é🙂 "])
def test_a_row_of_bytes_that_is_text_only_as_a_whole_hides_no_stop_text(letters, seed):
    rng, pieces = random.Random(seed), [*range(256), *"ab日 "]
    decode, num_found = fallback_decoder(pieces), 0
    for _ in range(25):
        texts = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(2)]
        ids: list[int] = []
        for character in "".join(rng.choices(letters, k=30)) + texts[0]:
            can_be_one = character in pieces and rng.random() < 0.5
            ids += [pieces.index(character)] if can_be_one else character.encode()
        if rng.random() < 0.3:
            ids.insert(rng.randrange(len(ids)), 0x9F)
        for end in range(1, len(ids) + 1):
            whole = any(text in decode(ids[:end]) for text in texts)
            assert StopTexts(decode).completed(request_with(*texts), ids[:end]) == whole
            if whole:
                num_found += 1
                break
    assert num_found > 0


def test_only_the_tail_of_a_long_completion_is_decoded():
    longest = 0

    def decode(ids) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "x" * len(ids)

    assert not StopTexts(decode).completed(request_with("<end>"), [1] * 5000)
    assert longest < 20


def test_tokens_without_text_do_not_hide_a_stop_text():
    pieces = ["a", "b", ""]
    stops = StopTexts(lambda ids: "".join(pieces[i] for i in ids))
    assert stops.completed(request_with("ab"), [0, *[2] * 300, 1])
    assert not stops.completed(request_with("ab"), [1, *[2] * 300, 0])


def letters(ids) -> str:
    """Token 0 is "ab", which holds more than a letter; every other is one character."""
    return "".join("ab" if i == 0 else chr(ord("a") + i) for i in ids)


def expected_end(tokens, texts) -> int | None:
    ends = (n for n in range(1, len(tokens) + 1) if any(t in letters(tokens[:n]) for t in texts))
    return next(ends, None)


@pytest.mark.parametrize("max_slots", [3, 16])
def test_a_stop_text_ends_a_sample_with_the_token_that_completes_it(max_slots):
    plain = {"max_tokens": 12, "samples": 4, "temperature": 1.5}
    free = make_engine("llama", max_slots=max_slots).generate(make_requests(**plain))
    # Some that occur: across two tokens, a single character, and one inside the token 0.
    texts = (letters(free[0].token_ids_T[3:5]), letters(free[5].token_ids_T[6:7]), "a")
    engine = make_engine("llama", max_slots=max_slots, decode=letters)
    stopped = engine.generate(make_requests(**plain, stop=texts))
    ends = [expected_end(completion.token_ids_T, texts) for completion in free]
    assert len({end for end in ends if end}) > 2
    for ours, whole, end in zip(stopped, free, ends, strict=True):
        assert ours.token_ids_T == whole.token_ids_T[:end]
        assert ours.full_T == pytest.approx(whole.full_T[:end], abs=1e-12, rel=0)
        assert ours.finish_reason == ("stop" if end else "length")


def test_a_stop_text_is_looked_for_in_the_completion_alone():
    (free,) = make_engine("llama").generate(make_requests(prompts=1, samples=1, max_tokens=6))
    prompt, tokens = free.request.prompt_ids, free.token_ids_T
    for text in (letters(prompt), letters((prompt[-1], tokens[0]))):
        assert text not in letters(tokens)
        (ours,) = make_engine("llama", decode=letters).generate(
            make_requests(prompts=1, samples=1, max_tokens=6, stop=(text,))
        )
        assert (ours.token_ids_T, ours.finish_reason) == (tokens, "length")


def test_every_rank_stops_at_the_same_token():
    (free,) = make_engine("llama").generate(make_requests(prompts=1, samples=1, max_tokens=9))
    stop = (letters(free.token_ids_T[4:6]),)
    requests = make_requests(prompts=3, samples=2, max_tokens=9, stop=stop)
    whole = make_engine("llama", decode=letters, max_slots=4).generate(requests)
    assert whole[0].finish_reason == "stop"
    for cut in run_threads(
        lambda comm: make_engine("llama", comm=comm, decode=letters, max_slots=4).generate(
            requests
        ),
        2,
    ):
        assert [c.token_ids_T for c in cut] == [c.token_ids_T for c in whole]
        assert [c.finish_reason for c in cut] == [c.finish_reason for c in whole]


def test_rows_without_stop_texts_are_never_decoded():
    decoded = []

    def decode(ids) -> str:
        decoded.append(tuple(ids))
        return letters(ids)

    with_text = make_requests(prompts=1, samples=1, max_tokens=4, stop=("never",))
    without = make_requests(prompts=1, samples=3, max_tokens=4)[1:]
    first, *_ = make_engine("llama", decode=decode).generate([*with_text, *without])
    assert decoded == [first.token_ids_T[:n] for n in range(1, 5)]


def test_stop_texts_without_a_decoder_are_refused_before_anything_runs():
    engine = make_engine("llama")
    plain = make_requests(prompts=1, samples=1)
    asking = make_requests(prompts=2, samples=1, stop=("\n",))[1:]
    with pytest.raises(UsageError, match=r"'p1'.*stop=.*decode=tokenizer\.decode"):
        engine.generate([*plain, *asking])
    assert (engine.num_in_flight, engine.num_steps) == (0, 0)


def test_a_decoder_that_fails_leaves_the_step_to_be_made_again():
    requests = make_requests(prompts=1, samples=2, max_tokens=5, stop=("never",))
    expected = make_engine("llama", decode=letters).generate(requests)
    calls = iter(range(100))

    def decode(ids) -> str:
        if next(calls) == 5:
            raise MemoryError("no room to decode")
        return letters(ids)

    engine, finished = make_engine("llama", decode=decode), []
    engine.submit(requests)
    with pytest.raises(MemoryError, match="no room to decode"):
        for _ in range(5):
            finished += engine.step()
    while engine.num_in_flight:
        finished += engine.step()
    assert [c.token_ids_T for c in finished] == [c.token_ids_T for c in expected]
    assert VOCAB > 26, "letters gives every id a text"
