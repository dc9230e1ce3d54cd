"""A causal language model that answers with log-probs of chosen tokens. Floor 2; for the trainer.

Shape letters: B rows, T tokens of a row, D width, V vocabulary, n scored tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardloop.head import VocabShard, token_logprobs


class Policy(nn.Module):
    """Decoder and head in one module call: what shards the module has the head's weight gathered.

    Parameters have their Hugging Face names; a tied head is the embedding itself, and
    `named_parameters` lists it once.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.model: nn.Module = causal_lm.model  # type: ignore[assignment]
        self.lm_head: nn.Module = causal_lm.lm_head  # type: ignore[assignment]
        self.vocab: VocabShard | None = None
        """Set by whoever cuts the head's rows over ranks, and makes its weight a DTensor."""

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        segment_ids_BT: Tensor,
        target_positions_n: Tensor,
        target_ids_n: Tensor,
        *,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Score tokens of packed rows.

        Args:
            input_ids_BT: int64; rows hold whole sequences one after the other, then padding.
            position_ids_BT: int64; position within the token's own sequence.
            segment_ids_BT: int64; equal for tokens of one sequence, -1 for padding. A token sees
                only its own segment.
            target_positions_n: int64; flat index into B*T of the token *before* each scored one.
            target_ids_n: int64; the scored tokens.
            temperature: log-probs are those of logits / temperature.
        Returns:
            (logprobs_n, entropy_n), natural logarithms.
        """
        hidden_BTD = self.model(
            input_ids=input_ids_BT,
            position_ids=position_ids_BT,
            attention_mask=block_causal_mask(segment_ids_BT),
            use_cache=False,
        ).last_hidden_state
        hidden_nD = hidden_BTD.flatten(0, 1)[target_positions_n]
        weight_VD: Any = self.lm_head.weight
        if self.vocab is not None:
            weight_VD = weight_VD.to_local()
        return token_logprobs(
            hidden_nD, weight_VD, target_ids_n, temperature=temperature, vocab=self.vocab
        )


def block_causal_mask(segment_ids_BT: Tensor) -> Tensor:
    """Bool [B, 1, T, T]: query (dim 2) may look at key (dim 3), of its own segment and not later.

    Padding tokens form a segment of their own, so that no query is left without a key.
    """
    num_tokens = segment_ids_BT.shape[1]
    place_T = torch.arange(num_tokens, device=segment_ids_BT.device)
    earlier_TT = place_T[:, None] >= place_T
    same_BTT = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return (same_BTT & earlier_TT)[:, None]
