"""Which calls the attention kernels take. They count in 32 bits and have 32 KiB of threadgroup memory; what is beyond
goes to their twins in MLX operations, which have no such limits."""

from __future__ import annotations

from typing import Final

from pion.metal_kernels.plans import GROUPS, MOST_DIM
from pion.ref import turbo

__all__ = ["MOST_BLOCKS", "THREADGROUP_BYTES", "threadgroup_bytes", "unfit"]

MOST_BLOCKS: Final = 16384  # their flags are in threadgroup memory
THREADGROUP_BYTES: Final = 32 << 10  # of every Apple GPU
_MOST_ROWS: Final = 8  # query rows that a threadgroup takes
_WORD: Final = 1 << 32


def threadgroup_bytes(body: str, *, dim: int = 0, rows: int = _MOST_ROWS, blocks: int = 1) -> int:
    """Bytes of the threadgroup arrays that a kernel declares.

    Args:
        body: its name.
        dim: values of a head.
        rows: query rows of a threadgroup.
        blocks: that are ranked.
    """
    if body in ("attend", "attend_rows"):
        return 4 * GROUPS * (dim + 2 * rows)
    if body == "rotate":
        return 4 * max(turbo.blocks(dim, dim))
    if body == "block_top":
        return max(256, 1 << (blocks - 1).bit_length())
    return 4 * 4 if body == "block_scores" else 0


def unfit(
    heads: int,
    length: int,
    dim: int,
    kv_heads: int,
    stored: int,
    *,
    suffix: int = 0,
    picked: int = 0,
    block: int = 1,
    nbytes: int = 0,
    blocks: int = 1,
) -> str | None:
    """Why the kernels do not take a call; None: they do.

    Args:
        heads, length, dim: of the queries (H_q, M, D).
        kv_heads, stored: of the keys (H, N, D).
        suffix: positions behind them.
        picked: numbers of positions or blocks that are read, of all heads together.
        block: positions of a block.
        nbytes: of the rows of one side, as they are stored.
        blocks: that are ranked.
    """
    if not 1 <= dim <= MOST_DIM:
        return f"heads of {dim} values: 1 to {MOST_DIM}"
    if blocks > MOST_BLOCKS:
        return f"{blocks} blocks: at most {MOST_BLOCKS}"
    for name, count in (
        ("values of queries", heads * length * dim),
        ("values of keys", kv_heads * stored * dim),
        ("values of a suffix", kv_heads * suffix * dim),
        ("places", max(picked * block, stored + block) + suffix),
        ("bytes of rows", nbytes),
    ):
        if count >= _WORD:
            return f"{count} {name}: fewer than {_WORD}"
    for body in ("attend", "attend_rows", "block_top"):
        need = threadgroup_bytes(body, dim=dim, blocks=blocks)
        if need > THREADGROUP_BYTES:
            return f"{need} bytes of threadgroup memory: at most {THREADGROUP_BYTES}"
    return None
