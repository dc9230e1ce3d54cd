"""Attention of each query over its own sequence's keys, whatever else is computed. Floor 2.

Called by the shared layer, through the engine's histories and the trainer's packed rows.

    queries of one kv head ──▶ tiles of ROWS rows ──▶ GROUP tiles at once
    keys of one sequence   ──▶ blocks of BLOCK keys from its key 0    ──▶ one product for each block

Every product has the shape [GROUP, ROWS, E] x [GROUP, E, BLOCK], or back. Later blocks add zeros to
a row's sums, and hidden keys have weight 0: neither changes a bit.

Shapes: B rows, T queries and C keys of a row, H query heads and K kv heads, E head_dim; g tiles of
a group, R rows of a tile, X keys of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardloop.invariant.rows import elementwise, row_sum, with_gradient_of

ROWS, BLOCK, GROUP = 16, 64, 32
WIDTH_STEP = 16
"""head_dim is padded to a multiple of this: narrow products have routines of their own."""


def attention(
    q_BTHE: Tensor, keys_BKCE: Tensor, values_BKCE: Tensor, positions_BT: Tensor
) -> Tensor:
    """Query (b, t) sees keys 0..positions[b, t] of row b: [B, T, H, E].

    A query at position -1 is padding: its result is 0 and it carries no gradient. Keys and values
    that no query sees must be finite.
    """
    result: Tensor = with_gradient_of(_plain, _exact, q_BTHE, keys_BKCE, values_BKCE, positions_BT)
    return result


def _plain(q_BTHE: Tensor, keys_BKCE: Tensor, values_BKCE: Tensor, positions_BT: Tensor) -> Tensor:
    places_C = torch.arange(keys_BKCE.shape[2], device=q_BTHE.device)
    seen_B1TC = (places_C <= positions_BT.clamp(min=0)[..., None])[:, None]
    out_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2), keys_BKCE, values_BKCE, attn_mask=seen_B1TC, enable_gqa=True
    )
    return out_BHTE.transpose(1, 2).masked_fill(positions_BT[..., None, None] < 0, 0.0)


def _exact(q_BTHE: Tensor, keys_BKCE: Tensor, values_BKCE: Tensor, positions_BT: Tensor) -> Tensor:
    num_rows, num_queries, num_heads, head_dim = q_BTHE.shape
    num_kv_heads = keys_BKCE.shape[1]
    group_size = num_heads // num_kv_heads
    q_BTKGE = (q_BTHE * head_dim**-0.5).unflatten(2, (num_kv_heads, group_size))
    q_BKrE = q_BTKGE.transpose(1, 2).flatten(2, 3)
    padding = -(num_queries * group_size) % ROWS
    q_tRE = F.pad(q_BKrE, (0, 0, 0, padding)).reshape(-1, ROWS, head_dim)
    last_Br = F.pad(positions_BT.repeat_interleave(group_size, 1), (0, padding), value=-1)
    last_tR = last_Br[:, None].expand(-1, num_kv_heads, -1).reshape(-1, ROWS)
    tiles_per_head = last_Br.shape[1] // ROWS
    deepest_t = last_tR.amax(1)
    out_tRE = torch.zeros_like(q_tRE)
    order_t = deepest_t.argsort(stable=True)
    for tiles in order_t[deepest_t[order_t] >= 0].split(GROUP):
        source = (tiles // (num_kv_heads * tiles_per_head), tiles // tiles_per_head % num_kv_heads)
        out_tRE[tiles] = _attend_group(
            q_tRE[tiles], keys_BKCE, values_BKCE, source=source, last_gR=last_tR[tiles]
        )
    out_BKrE = out_tRE.view(num_rows, num_kv_heads, -1, head_dim)
    out_BKTGE = out_BKrE[:, :, : num_queries * group_size].unflatten(2, (num_queries, group_size))
    out_BTHE = out_BKTGE.transpose(1, 2).flatten(2, 3)
    return out_BTHE.masked_fill(positions_BT[..., None, None] < 0, 0.0)


def _attend_group(
    q_gRE: Tensor,
    keys_BKCE: Tensor,
    values_BKCE: Tensor,
    *,
    source: tuple[Tensor, Tensor],
    last_gR: Tensor,
) -> Tensor:
    """Up to GROUP tiles; tile i reads the keys of (row, kv head) source[:][i] up to last_gR[i]."""
    num_tiles, _, head_dim = q_gRE.shape
    width = -(-head_dim // WIDTH_STEP) * WIDTH_STEP
    q_gRE = _padded(q_gRE, GROUP, ROWS, width)
    last_gR = F.pad(last_gR, (0, 0, 0, GROUP - num_tiles)).clamp(min=0)
    places_X = torch.arange(BLOCK, device=q_gRE.device)

    def block(cache_BKCE: Tensor, first: int) -> Tensor:
        return _padded(cache_BKCE[:, :, first : first + BLOCK][source], GROUP, BLOCK, width)

    starts = range(0, int(last_gR.max()) + 1, BLOCK)
    scores = [torch.bmm(q_gRE, block(keys_BKCE, first).transpose(1, 2)) for first in starts]
    for first, scores_gRX in zip(starts, scores, strict=True):
        scores_gRX.masked_fill_(first + places_X > last_gR[..., None], float("-inf"))
    most_gR1 = torch.stack([scores_gRX.amax(-1) for scores_gRX in scores]).amax(0)[..., None]
    total_gR, out_gRE = torch.zeros_like(most_gR1[..., 0]), torch.zeros_like(q_gRE)
    for first, scores_gRX in zip(starts, scores, strict=True):
        weights_gRX = elementwise(torch.exp, scores_gRX - most_gR1)
        total_gR += row_sum(weights_gRX)
        out_gRE += torch.bmm(weights_gRX, block(values_BKCE, first))
    return (out_gRE / total_gR[..., None])[:num_tiles, :, :head_dim]


def _padded(x: Tensor, *shape: int) -> Tensor:
    """x at the start of zeros of `shape`: fresh, contiguous storage."""
    padded = x.new_zeros(shape)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded
