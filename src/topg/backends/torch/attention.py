"""Causal attention of one sequence's new tokens over its cached keys and values, in two versions.

`flash_attention` is the fast one: tiles of query rows against blocks of keys that start at multiples of KEY_BLOCK.  A
query meets the same blocks in the same order however its prompt was cut into steps, and a block without a visible key
changes nothing, so its result depends on its own sequence alone.  `plain_attention` is the definition, one query after
the other; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from topg.backends.torch.elementwise import softcap, tree_sum
from topg.ops import Attention

# Matrix products have fixed shapes, for the reason given in linear.py.
QUERY_TILE = 16
KEY_BLOCK = 256
TILES_AT_A_TIME = 8  # the scores of so many tiles stay in the cache

LOWEST = torch.finfo(torch.float32).min

# Keys and values of the tokens from one position up to another, each [kv_heads, tokens, head_dim].
ReadKeys = Callable[[int, int], tuple[Tensor, Tensor]]
# (op, query [tokens, heads, head_dim], position of the first query, keys) -> [tokens, heads, head_dim]
Attend = Callable[[Attention, Tensor, int, ReadKeys], Tensor]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim/2) of each head's first dim values.

    x [rows, heads, head_dim]; cos and sin [rows, dim/2].  Values after the first dim pass through.
    """
    half = cos.shape[1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def plain_attention(op: Attention, query: Tensor, start: int, read: ReadKeys) -> Tensor:
    """Softmax over the whole row of visible keys, one query token at a time."""
    out = torch.empty_like(query)
    for row, position in enumerate(range(start, start + query.shape[0])):
        keys, values = read(_first_visible(op, position), position + 1)
        grouped = query[row].view(op.kv_heads, -1, op.head_dim)
        weights = torch.softmax(_scores(op, grouped, keys), dim=-1)
        out[row] = torch.bmm(weights, values).view(op.heads, op.head_dim)
    return out


def flash_attention(op: Attention, query: Tensor, start: int, read: ReadKeys) -> Tensor:
    """The same block by block (arXiv 2205.14135), each with its own maximum, sum and output, folded in order."""
    tiles, positions = _query_tiles(op, query, start)
    parts = [
        _attend_tiles(op, tiles[chunk : chunk + TILES_AT_A_TIME], positions[chunk : chunk + TILES_AT_A_TIME], read)
        for chunk in range(0, len(tiles), TILES_AT_A_TIME)
    ]
    rows = torch.cat(parts).transpose(0, 1).flatten(1, 2)[:, : query.shape[0] * (op.heads // op.kv_heads)]
    by_token = rows.reshape(op.kv_heads, query.shape[0], -1, op.head_dim).transpose(0, 1)
    return by_token.reshape(query.shape)


def _query_tiles(op: Attention, query: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Queries as [tiles, kv_heads, QUERY_TILE, head_dim] and the rows' positions [tiles, QUERY_TILE].

    The rows of a KV head are its query heads of the first token, of the second, and so on; rows that fill up the last
    tile are zeros at the last position.
    """
    tokens, group = query.shape[0], op.heads // op.kv_heads
    tiles = -(-tokens * group // QUERY_TILE)
    missing = tiles * QUERY_TILE - tokens * group
    rows = query.view(tokens, op.kv_heads, group, op.head_dim).transpose(0, 1).flatten(1, 2)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    positions = torch.arange(start, start + tokens, device=query.device).repeat_interleave(group)
    positions = torch.cat((positions, positions[-1:].expand(missing)))
    tiled = rows.view(op.kv_heads, tiles, QUERY_TILE, op.head_dim).transpose(0, 1)
    return tiled, positions.view(tiles, QUERY_TILE)


def _attend_tiles(op: Attention, tiles: Tensor, positions: Tensor, read: ReadKeys) -> Tensor:
    """Attention of tiles [tiles, kv_heads, QUERY_TILE, head_dim] at positions [tiles, QUERY_TILE]."""
    maximum = tiles.new_full((*tiles.shape[:3], 1), LOWEST)
    total, output = torch.zeros_like(maximum), torch.zeros_like(tiles)
    end = int(positions[-1, -1]) + 1
    first_block = _first_visible(op, int(positions[0, 0])) // KEY_BLOCK * KEY_BLOCK
    for block in range(first_block, end, KEY_BLOCK):
        keys, values = (_filled(part) for part in read(block, min(block + KEY_BLOCK, end)))
        block_maximum, block_total, block_output = _attend_block(op, tiles, positions, block, keys, values)
        new_maximum = torch.maximum(maximum, block_maximum)
        before, now = torch.exp(maximum - new_maximum), torch.exp(block_maximum - new_maximum)
        total = total * before + block_total * now
        output = output * before + block_output * now
        maximum = new_maximum
    return output / total


def _attend_block(
    op: Attention, tiles: Tensor, positions: Tensor, block: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's maximum, sum of weights [tiles, kv_heads, QUERY_TILE, 1] and weighted values [.., head_dim].

    Hidden keys get weight zero exactly; a row that sees no key of the block gets (LOWEST, 0, 0).
    """
    count = tiles.shape[0]
    scores = _scores(op, tiles.flatten(0, 1), keys.repeat(count, 1, 1)).view(*tiles.shape[:3], KEY_BLOCK)
    scores = scores.masked_fill(~_visible(op, positions, block)[:, None], -torch.inf)
    maximum = scores.amax(dim=-1, keepdim=True).clamp(min=LOWEST)
    weights = torch.exp(scores - maximum)
    output = torch.bmm(weights.flatten(0, 1), values.repeat(count, 1, 1)).view(tiles.shape)
    return maximum, tree_sum(weights), output


def _scores(op: Attention, query: Tensor, keys: Tensor) -> Tensor:
    """query [batch, rows, head_dim], keys [batch, tokens, head_dim] -> [batch, rows, tokens]."""
    return softcap(torch.bmm(query, keys.transpose(1, 2)) * op.scale, op.softcap)


def _visible(op: Attention, positions: Tensor, block: int) -> Tensor:
    """Which keys of the block each row sees: [tiles, QUERY_TILE, KEY_BLOCK]."""
    distance = positions[:, :, None] - torch.arange(block, block + KEY_BLOCK, device=positions.device)
    visible = distance >= 0
    return visible if op.window is None else visible & (distance < op.window)


def _first_visible(op: Attention, position: int) -> int:
    return 0 if op.window is None else max(0, position - op.window + 1)


def _filled(keys: Tensor) -> Tensor:
    """Keys or values [kv_heads, tokens, head_dim] filled up with zeros to KEY_BLOCK tokens."""
    return torch.nn.functional.pad(keys, (0, 0, 0, KEY_BLOCK - keys.shape[1]))
