"""Attention over stored rows, of which no decoded copy is made: int8, fp8, mlx4g32, turbo, and plain words.

The kernel decodes values in registers, where they are used. Turbo rows are not even that: a decoded row is a rotation
of its levels, which are summed as they are. The rotation is applied once to the query and once to the answer, whatever
the number of keys. So a decoded value beyond 65,504 is not cut there, as decoding does.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion.limits import FORMATS
from pion.metal_kernels import portable
from pion.metal_kernels.attention import dense, join, merge
from pion.metal_kernels.bodies import BODIES
from pion.metal_kernels.device import Device
from pion.metal_kernels.plans import GROUPS, MOST_DIM, Heads, Slots, device_of, kv_heads, scale_bits, splits_of
from pion.metal_kernels.table import KEY_ROWS, Rows, bits_of, kernel_of, key_block_bytes
from pion.ref import quant, quant_keys, turbo

__all__ = ["block_angles", "dense_rows", "stored_bytes"]

F32 = NDArray[np.float32]

_PLAIN: Final = {FORMATS["fp16"]: "float16", FORMATS["bf16"]: "bfloat16", FORMATS["fp32"]: "float32"}
_AT_ONCE: Final = 4096  # rows that the twin decodes at a time
_TURBO, _KEYS = 1, 17  # forms of the kernel that stand for several formats
_OTHER_BITS: Final = 4  # of a form that has no use for it


def _is_keys(rows: Rows) -> bool:
    return bits_of(rows.fmt) > 0 and rows.fmt & 255 >= 16


def stored_bytes(rows: Rows) -> int:
    """How many bytes hold these rows: for key forms whole blocks of 64.

    Raises:
        ValueError: the kernels do not read such rows; the text says which they read.
    """
    code, dim = rows.fmt & 255, rows.dim
    if code not in _PLAIN and kernel_of(rows.fmt) is None:
        names = "int8, fp8, mlx4g32, turbo4, turbo3, turbo2, fp16, bf16, fp32"
        raise ValueError(f"attention does not read rows of format {code}: {names}")
    if not 1 <= rows.head_dim <= MOST_DIM or rows.heads < 1 or rows.count < 0:
        raise ValueError(
            f"{rows.count} rows of {rows.heads} heads of {rows.head_dim}: heads have 1 to {MOST_DIM} values"
        )
    if _is_keys(rows):
        if rows.head_dim % 2 or not 0 <= rows.skip < KEY_ROWS:
            raise ValueError(f"key forms: heads of {rows.head_dim} values, {rows.skip} rows skipped of the first block")
        return -(-(rows.skip + rows.count) // KEY_ROWS) * key_block_bytes(rows)
    if rows.skip or rows.turned:
        raise ValueError("only key forms skip rows of a block or carry a rope")
    if bits_of(rows.fmt) and (rows.fmt >> 8 != rows.head_dim or rows.head_dim % 8):
        raise ValueError(
            f"turbo rows of heads of {rows.head_dim}, encoded by {rows.fmt >> 8 or 'row'}: attention reads those that "
            "were registered with HEAD_DIM, a multiple of 8"
        )
    size = quant.row_bytes(rows.fmt, dim)
    if not size:
        raise ValueError(f"format {code} does not take rows of {dim} values")
    return rows.count * size


def block_angles(first: int, count: int, theta: float, head_dim: int) -> F32:
    """The turns of the rope for key forms, in two tables of which each angle is the sum of two.

    Args:
        first: position of the first row wanted; its block begins at a multiple of 64.
        count: rows wanted.
        theta: base of the rope.
        head_dim: of a head.

    Returns:
        (64 + blocks, 2, head_dim // 2), cosines and sines: of 0 to 63 positions, then of the blocks' first ones.
    """
    start = first // KEY_ROWS * KEY_ROWS
    blocks = -(-(first + count - start) // KEY_ROWS)
    pair = np.arange(head_dim // 2, dtype=np.float64)
    step = quant_keys.exp2(-(2.0 * pair / float(head_dim)) * quant_keys.log2(theta)) * 0.15915494309189535
    positions = np.concatenate([np.arange(KEY_ROWS), start + KEY_ROWS * np.arange(blocks)]).astype(np.float64)
    return np.stack(quant_keys.cos_sin(positions[:, None] * step), axis=1).astype(np.float32)


def dense_rows(
    q: Any,
    keys: Any,
    key_rows: Rows,
    values: Any,
    value_rows: Rows,
    *,
    turns: Any = None,
    scale: float | None = None,
    window: int = 0,
    sinks: Any = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> tuple[Any, Any]:
    """Attention over a prefix as it is stored.

    A prefix whose rows lie in several segments (`pion.wire.raw`) is attended to segment by segment, and the answers are
    merged.

    Args:
        q: float32 (H_q, M, D).
        keys, values: uint8, the stored bytes of the rows; for key forms, of whole blocks.
        key_rows, value_rows: what they are, of equal heads, head_dim and count; their formats may differ. Turbo rows
            are those of a head (HEAD_DIM); key forms are only for keys.
        turns: `block_angles` of the rows, for keys with a rope.
        scale, window, sinks, head_map: see `attention`.
        how: ``metal`` or ``ops``; the latter decodes 4,096 rows at a time.

    Returns:
        out (H_q, M, D) and lse (H_q, M).

    Raises:
        ValueError: rows that the kernels do not read, or that do not fit the bytes, the queries or each other.
        RuntimeError: Metal is asked for and not there.
    """
    kv_of = _check(q, keys, key_rows, values, value_rows, turns, head_map)
    heads, length, dim = q.shape
    first = max(key_rows.count - window, 0) if window > 0 else 0
    if how == "ops":
        return _twin(q, keys, key_rows, values, value_rows, turns, scale, first, sinks, kv_of)
    device = device_of(how)
    turned_q = rotate(device, q) if bits_of(key_rows.fmt) and not _is_keys(key_rows) else q
    slots = Slots.of(kv_of, key_rows.heads, length)
    at_once = min(4, slots.at_once(dim))
    count = len(slots.kv_of) * -(-slots.rows // at_once)
    stored = key_rows.skip + key_rows.count
    begin = (key_rows.skip + first) // 8 * 8
    splits, each = splits_of(stored - begin, count, GROUPS * 8)
    k_row = key_block_bytes(key_rows) if _is_keys(key_rows) else quant.row_bytes(key_rows.fmt, key_rows.dim)
    v_row = quant.row_bytes(value_rows.fmt, value_rows.dim)
    extent = [slots.rows, heads * length, key_rows.heads, key_rows.skip + first, stored, key_rows.skip, each]
    extent += [k_row, v_row, scale_bits(scale, dim)]
    parts, tops = device.call(
        BODIES["attend_rows"],
        {
            "T": "float32",
            "D": dim,
            "R": at_once,
            "G": GROUPS,
            "KFORM": _form(key_rows),
            "KBITS": bits_of(key_rows.fmt) or _OTHER_BITS,
            "TURNED": key_rows.turned,
            "VFORM": _form(value_rows),
            "VBITS": bits_of(value_rows.fmt) or _OTHER_BITS,
        },
        {
            "q": turned_q,
            "keys": keys,
            "values": values,
            "turns": device.array(np.zeros(8, np.float32)) if turns is None else turns,
            "kv_of": device.array(slots.kv_of),
            "extent": device.array(np.array(extent, np.uint32)),
        },
        (32 * GROUPS, count, splits),
        32 * GROUPS,
        [(splits, heads, length, dim), (splits, heads, length, 2)],
    )
    out, lse = join(device, parts, tops, sinks)
    return (rotate(device, out, back=True) if bits_of(value_rows.fmt) else out), lse


def _form(rows: Rows) -> int:
    """KFORM or VFORM of the kernel."""
    if not bits_of(rows.fmt):
        return rows.fmt & 255
    return _KEYS if _is_keys(rows) else _TURBO


def _check(q: Any, keys: Any, key_rows: Rows, values: Any, value_rows: Rows, turns: Any, head_map: Heads) -> Any:
    """The head of keys of each query head."""
    if len(q.shape) != 3 or 0 in q.shape:
        raise ValueError(f"queries {q.shape}, not (H_q, M, D)")
    shapes = [(rows.heads, rows.count, rows.head_dim) for rows in (key_rows, value_rows)]
    if shapes[0] != shapes[1] or shapes[0][2] != q.shape[2]:
        raise ValueError(f"queries {q.shape}, keys {shapes[0]} and values {shapes[1]} do not fit")
    if _is_keys(value_rows):
        raise ValueError("values are not stored in key forms")
    for side, rows in ((keys, key_rows), (values, value_rows)):
        if side.size != stored_bytes(rows):
            raise ValueError(f"{side.size} bytes for {rows.count} rows that take {stored_bytes(rows)}")
        if side.size >= 1 << 32:
            raise ValueError(f"{side.size} bytes of rows: fewer than {1 << 32} are supported")
    if key_rows.turned:
        blocks = -(-(key_rows.skip + key_rows.count) // KEY_ROWS)
        wanted = (KEY_ROWS + blocks, 2, key_rows.head_dim // 2)
        if turns is None or tuple(turns.shape) != wanted:
            raise ValueError(f"turns are {None if turns is None else turns.shape}, not {wanted}: see block_angles")
    return kv_heads(q.shape[0], key_rows.heads, head_map)


def rotate(device: Device, rows: Any, *, back: bool = False) -> Any:
    """Rows (..., D) times the rotation of a head of turbo rows, or back."""
    dim = rows.shape[-1]
    size = max(turbo.blocks(dim, dim))
    threads = min(256, max(32, -(-size // 64) * 32))
    count = int(np.prod(rows.shape[:-1]))
    (out,) = device.call(
        BODIES["rotate"],
        {"T": "float32", "D": dim, "N": size, "MOST": turbo.MOST, "BACK": back},
        {"rows": rows},
        (threads, count, 1),
        threads,
        [tuple(rows.shape)],
    )
    return out


# ---- the twin --------------------------------------------------------------------------------------------------------


def _twin(
    q: Any,
    keys: Any,
    key_rows: Rows,
    values: Any,
    value_rows: Rows,
    turns: Any,
    scale: float | None,
    first: int,
    sinks: Any,
    kv_of: Any,
) -> tuple[Any, Any]:
    """The same in MLX operations: some rows at a time are decoded and attended to."""
    import mlx.core as mx

    parts = []
    for start in range(first, key_rows.count, _AT_ONCE):
        count = min(_AT_ONCE, key_rows.count - start)
        k = _decoded(keys, key_rows, turns, start, count)
        v = _decoded(values, value_rows, None, start, count)
        parts.append(dense(q, k, v, scale=scale, head_map=kv_of, how="ops"))
    if not parts:
        none = mx.zeros((key_rows.heads, 0, key_rows.head_dim))
        return dense(q, none, none, scale=scale, sinks=sinks, head_map=kv_of, how="ops")
    outs, sums = (mx.stack([part[side] for part in parts]) for side in (0, 1))
    return merge(outs, sums, sinks=sinks, how="ops")


def _decoded(data: Any, rows: Rows, turns: Any, start: int, count: int) -> Any:
    """Rows from `start` on as float32 (heads, count, head_dim)."""
    import mlx.core as mx

    if _is_keys(rows):
        begin = rows.skip + start
        block, skip = begin // KEY_ROWS, begin % KEY_ROWS
        blocks = -(-(skip + count) // KEY_ROWS)
        size = key_block_bytes(rows)
        part = Rows(rows.fmt, rows.heads, rows.head_dim, count, count, skip, rows.turned)
        own = None
        if rows.turned:
            step, base = turns[:KEY_ROWS][None], turns[KEY_ROWS + block :][:blocks][:, None]
            (c0, s0), (c1, s1) = ((side[:, :, 0], side[:, :, 1]) for side in (base, step))
            own = mx.stack([c0 * c1 - s0 * s1, s0 * c1 + c0 * s1], axis=2)
            own = own.reshape(-1, 2, rows.head_dim // 2)[skip : skip + count]
        return portable.keys_turbo(data[block * size :][: blocks * size], part, mx.float32, own)[0]
    size = quant.row_bytes(rows.fmt, rows.dim)
    data = data[start * size :][: count * size]
    kind = _PLAIN.get(rows.fmt & 255)
    if kind is not None:
        words = data.view(getattr(mx, kind)).reshape(count, rows.heads, rows.head_dim)
        return words.transpose(1, 0, 2).astype(mx.float32)
    kernel = kernel_of(rows.fmt)
    assert kernel is not None
    part = Rows(rows.fmt, rows.heads, rows.head_dim, count, count)
    return getattr(portable, kernel.twin)(data, part, mx.float32)[0]
