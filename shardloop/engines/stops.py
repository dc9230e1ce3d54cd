"""Texts that end a completion, found as its tokens come.

Called by the local engine's slots. Floor 2. A text may span tokens, a token may hold more text
after it, and a character may span tokens: what counts is the text of the completion's own tokens.
"""

from collections.abc import Callable, Sequence

from shardloop.errors import UsageError
from shardloop.types import Request

Decode = Callable[[Sequence[int]], str]

MARGIN = 4
"""Characters by which a look at the newest tokens goes back further than the longest text: some
tokenizers decode the first token after a cut in another way, such as without its space."""
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to that are no whole character. Some tokenizers give it for all bytes in a row
where one of them is amiss, which a look may begin after: so the whole text has the last word."""


class StopTexts:
    """Decides whether a completion's newest token completes one of its request's stop texts."""

    def __init__(self, decode: Decode | None) -> None:
        """`decode` gives the text of token ids; None where no tokenizer is known."""
        self._decode = decode

    def check(self, requests: Sequence[Request]) -> None:
        """Raises UsageError where a request has stop texts and there is nothing to find them."""
        asking = [request for request in requests if request.sampling.stop]
        if asking and self._decode is None:
            raise UsageError(
                f"{asking[0].sample_id}: stop={asking[0].sampling.stop!r}, but this engine cannot "
                "decode tokens; make it with decode=tokenizer.decode, or use stop_token_ids"
            )

    def completed(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Whether the last of the completion's `token_ids` completes a stop text.

        None of those before it may have.
        """
        texts = request.sampling.stop
        if not texts:
            return False
        assert self._decode is not None, "check has seen the request"
        newest = self._newest_text(token_ids, num_chars=max(map(len, texts)) + MARGIN)
        if not any(text in newest for text in texts):
            return False
        whole = self._decode(token_ids)
        return any(text in whole for text in texts)

    def _newest_text(self, token_ids: Sequence[int], *, num_chars: int) -> str:
        """Text of the last token and of tokens with at least `num_chars` before it, or of all."""
        assert self._decode is not None, "check has seen the request"
        size = num_chars + 1
        while size < len(token_ids):
            before = self._decode(token_ids[-size:-1])
            if len(before) - before.count(NO_CHARACTER) >= num_chars:
                break
            size *= 2
        return self._decode(token_ids[-size:])
