"""Log-softmax statistics of logits that come tile by tile, on one rank or many.

Called by the head, which never holds a whole row of logits. Floor 2.

    tile of logits ─▶ add (on every rank, its own part of the vocabulary) ─▶ merge ─▶ log-probs

Each statistic is relative to the largest logit so far and rescaled when a larger one comes, be it
in the next tile or on another rank. Shapes: n tokens · c tokens of a tile · v vocabulary of a tile.
"""

import torch
from torch import Tensor

from shardloop.model.tensor_parallel import TensorParallel


class RunningSoftmax:
    """What softmax(logits / temperature) needs of each of n rows, in the dtype of the logits.

    With s_j = (logit_j - max) / temperature, at most 0:
    """

    max_n: Tensor
    """The largest logit so far; -inf before the first."""
    target_n: Tensor
    """The target's logit; -inf as long as it has not come."""
    sum_n: Tensor
    """The sum of exp(s_j)."""
    weighted_n: Tensor
    """The sum of exp(s_j) s_j."""

    def __init__(self, like_n: Tensor, *, temperature: float) -> None:
        """`like_n` gives number of rows, dtype and device."""
        self.temperature = temperature
        self.max_n = torch.full_like(like_n, -torch.inf)
        self.target_n = torch.full_like(like_n, -torch.inf)
        self.sum_n = torch.zeros_like(like_n)
        self.weighted_n = torch.zeros_like(like_n)

    def add(self, rows: slice, logits_cv: Tensor, *, target_c: Tensor, is_here_c: Tensor) -> None:
        """Take in some logits of some rows; overwrites `logits_cv`.

        Args:
            target_c: int64 in [0, v), the target's column where `is_here_c`; else any column.
        """
        logit_c = logits_cv.gather(-1, target_c[:, None]).squeeze(-1)
        self.target_n[rows] = torch.where(is_here_c, logit_c, self.target_n[rows])
        self._raise_max(rows, torch.maximum(self.max_n[rows], logits_cv.amax(-1)))
        shifted_cv = shifted_(logits_cv, self.max_n[rows], temperature=self.temperature)
        exp_cv = shifted_cv.exp()
        self.sum_n[rows] += exp_cv.sum(-1)
        self.weighted_n[rows] += shifted_cv.mul_(exp_cv).sum(-1)

    def merge(self, tp: TensorParallel) -> None:
        """Collective over `tp`: every rank gets the statistics of all ranks' logits together."""
        max_n, self.target_n = tp.all_reduce_max(torch.stack([self.max_n, self.target_n]))
        self._raise_max(slice(None), max_n)
        self.sum_n, self.weighted_n = tp.all_reduce(torch.stack([self.sum_n, self.weighted_n]))

    def logprobs_and_entropy(self) -> tuple[Tensor, Tensor]:
        """Of the targets and of the distributions, once all logits are in."""
        log_sum_n = self.sum_n.log()
        shifted_n = (self.target_n - self.max_n) / self.temperature
        return shifted_n - log_sum_n, log_sum_n - self.mean_shifted_n()

    def mean_shifted_n(self) -> Tensor:
        """The mean of s_j under the distribution."""
        return self.weighted_n / self.sum_n

    def _raise_max(self, rows: slice, max_c: Tensor) -> None:
        step_c = (self.max_n[rows] - max_c) / self.temperature
        # The first logits come after a maximum of -inf, which must not make 0 * -inf.
        step_c.clamp_(min=torch.finfo(step_c.dtype).min)
        factor_c = step_c.exp()
        self.weighted_n[rows] = factor_c * (self.weighted_n[rows] + step_c * self.sum_n[rows])
        self.sum_n[rows] *= factor_c
        self.max_n[rows] = max_c


def shifted_(logits_cv: Tensor, max_c: Tensor, *, temperature: float) -> Tensor:
    """In place: (logits - max) / temperature, in this order.

    Dividing first would enlarge what the logits have in common, and with it the rounding of their
    differences.
    """
    logits_cv.sub_(max_c[:, None])
    return logits_cv if temperature == 1.0 else logits_cv.div_(temperature)
