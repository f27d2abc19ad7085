"""What the attention kernels are tried on, and what `pion.ref.attention` says in double precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest

from pion import metal_kernels
from pion.metal_kernels import Rows
from pion.ref import attention as ref
from pion.ref import quant
from tests.metal import cases
from tests.metal.emulator import Array
from tests.support import models

mx = models.mx

DIMS: Final = (32, 64, 80, 96, 128, 256)
COUNTS: Final = (1, 31, 32, 33, 1000, 4097)
SHARES: Final = (1, 3, 8)  # query heads of a head of keys
FEW_DIMS: Final = tuple(dim if dim in (64, 80) else pytest.param(dim, marks=pytest.mark.slow) for dim in DIMS)
ORDERS: Final = cases.ORDERS[:2]  # forward, reverse
EPS: Final = float(np.finfo(np.float32).eps)

Convert = Callable[[Any], Any]


def to_mx(array: Array) -> Any:
    """An array of mlx; uint16 words are bfloat16."""
    return mx.array(array).view(mx.bfloat16) if array.dtype == np.uint16 else mx.array(array)


def numbers(array: Array) -> Array:
    """The values of an array, in double precision."""
    return (quant.bf16_to(array) if array.dtype == np.uint16 else array).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: for messages.
        call: (how, convert) to (out, lse); `convert` makes an array what `how` takes.
        want: the same of the reference.
        loudest: the largest |logit|.
        largest: the largest |value|.
    """

    name: str
    call: Callable[[Any, Convert], tuple[Any, Any]]
    want: tuple[Array, Array]
    loudest: float
    largest: float

    def compare(self, got: tuple[Any, Any], slack: float = 1.0) -> None:
        """1e-6 for |logit| up to 5, else 8 eps |logit| |value|; the logarithm likewise."""
        out, lse = (np.array(side) for side in got)
        assert (out.dtype, lse.dtype) == (np.float32, np.float32), self.name
        rounding = 8 * EPS * self.loudest
        largest = max(1.0, self.largest)
        np.testing.assert_allclose(
            out, self.want[0], rtol=0, atol=slack * max(1e-6, rounding) * largest, err_msg=self.name
        )
        # Infinities must agree.
        finite = self.want[1][np.isfinite(self.want[1])]
        room = slack * max(1e-6, rounding, 4 * EPS * float(np.abs(finite).max(initial=0)))
        np.testing.assert_allclose(lse, self.want[1], rtol=0, atol=room, err_msg=self.name)


def side(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
    return cases.kind(dtype, rng.normal(size=shape).astype(np.float32))


def with_sinks(part: ref.Part, sinks: Array | None) -> ref.Part:
    """A sink is a key of its own logit whose value is zero."""
    if sinks is None:
        return part
    length = part[1].shape[1]
    return ref.merge([part, (np.zeros_like(part[0]), np.repeat(sinks[:, None].astype(np.float64), length, 1))])


def over(q: Array, k: Array, v: Array, kv_of: Array, seen: Array | None, sinks: Array | None) -> tuple[ref.Part, float]:
    """The reference, head by head, and the largest |logit|; seen (M, N) or (H_q, M, N)."""
    parts = []
    for head, kv in enumerate(kv_of):
        mask = seen if seen is None or seen.ndim == 2 else seen[head]
        parts.append(ref.attend(q[head : head + 1], k[kv : kv + 1], v[kv : kv + 1], seen=mask))
    out, lse = (np.concatenate(column) for column in zip(*parts, strict=True))
    logits = np.abs(q @ k[kv_of].swapaxes(1, 2)).max(initial=0) * q.shape[2] ** -0.5
    return with_sinks((out, lse), sinks), float(logits)


def attention(
    dim: int,
    count: int,
    share: int,
    *,
    heads: int = 2,
    length: int = 1,
    dtype: str = "float32",
    window: int = 0,
    suffix: int | None = None,
    sinks: bool = False,
    head_map: Sequence[int] | None = None,
    loud: float = 1.0,
) -> Case:
    """`dense`, or `fused` with a suffix."""
    rng = np.random.default_rng([dim, count, share, length])
    q = rng.normal(size=(heads * share, length, dim)).astype(np.float32) * np.float32(loud)
    k, v = side(rng, (heads, count, dim), dtype), side(rng, (heads, count, dim), dtype)
    tail = [side(rng, (heads, suffix or 0, dim), dtype) for _ in range(2)]
    logits = rng.normal(size=heads * share).astype(np.float32) if sinks else None
    kv_of = np.arange(heads * share) // share if head_map is None else np.array(head_map)
    more: dict[str, Any] = {"window": window, "head_map": head_map}

    def call(how: Any, convert: Convert) -> tuple[Any, Any]:
        given = {**more, "sinks": None if logits is None else convert(logits), "how": how}
        if suffix is None:
            return metal_kernels.dense(convert(q), convert(k), convert(v), **given)
        return metal_kernels.fused(*map(convert, (q, k, v, *tail)), **given)

    first = max(count - window, 0) if window else 0
    keys, values = (
        np.concatenate([numbers(a)[:, first:], numbers(b)], axis=1) for a, b in zip((k, v), tail, strict=True)
    )
    own, later = count - first, suffix or 0
    seen = np.arange(own + later)[None] - own <= np.arange(length)[:, None] + max(later - length, 0)
    want, loudest = over(q.astype(np.float64), keys, values, kv_of, seen, logits)
    name = f"D {dim} N {count} x{share} M {length} {dtype} window {window} suffix {suffix} sinks {sinks} map {head_map}"
    return Case(name, call, want, loudest, float(np.abs(values).max(initial=0)))


def gathered(
    dim: int, count: int, share: int, *, heads: int = 2, dtype: str = "float32", window: int = 0, sinks: bool = False
) -> Case:
    """`gather`: half of the keys, in any order, some of them twice and some outside; one head picks none."""
    rng = np.random.default_rng([dim, count, share, 7])
    every = heads * share
    q = rng.normal(size=(every, dim)).astype(np.float32)
    k, v = side(rng, (heads, count, dim), dtype), side(rng, (heads, count, dim), dtype)
    room = count // 2 + 3
    indices = rng.integers(-2, count + 3, (every, room)).astype(np.int32)
    indices[:, 0] = -(2**31)
    indices[:, 1] = 2**31 - 1
    counts = rng.integers(2, room + 1, every).astype(np.uint32)
    counts[-1] = 0
    logits = rng.normal(size=every).astype(np.float32) if sinks else None

    def call(how: Any, convert: Convert) -> tuple[Any, Any]:
        given = [convert(array) for array in (q, k, v, indices, counts)]
        return metal_kernels.gather(*given, window=window, sinks=None if logits is None else convert(logits), how=how)

    first = max(count - window, 0) if window else 0
    keys, values = numbers(k), numbers(v)
    parts = []
    for head in range(every):
        picked = indices[head, : counts[head]]
        picked = picked[(picked >= first) & (picked < count)]
        kv = head // share
        parts.append(
            ref.attend(q[head][None, None].astype(np.float64), keys[kv : kv + 1, picked], values[kv : kv + 1, picked])
        )
    out, lse = with_sinks(tuple(np.concatenate(column) for column in zip(*parts, strict=True)), logits)
    loudest = float(np.abs(q.astype(np.float64) @ keys.reshape(-1, dim).T).max() * dim**-0.5)
    name = f"gather D {dim} N {count} x{share} {dtype} window {window} sinks {sinks}"
    return Case(name, call, (out[:, 0], lse[:, 0]), loudest, float(np.abs(values).max()))


def in_blocks(
    dim: int,
    count: int,
    share: int,
    *,
    block: int = 16,
    heads: int = 2,
    dtype: str = "float32",
    window: int = 0,
    suffix: int | None = None,
) -> Case:
    """`gather_blocks`: about a third of the blocks and the last one, -1 and numbers outside among them, also one whose
    first position is 0 in 32 bits."""
    rng = np.random.default_rng([dim, count, share, 8])
    q = rng.normal(size=(heads * share, dim)).astype(np.float32)
    k, v = side(rng, (heads, count, dim), dtype), side(rng, (heads, count, dim), dtype)
    tail = [side(rng, (heads, suffix or 0, dim), dtype) for _ in range(2)]
    last = (count - 1) // block
    picked = np.unique(np.append(rng.integers(0, last + 1, last // 3 + 1), last))
    blocks = np.concatenate([picked, [-1, last + 1, 2**31 - 1, -(2**31), -(-(2**32) // block)]]).astype(np.int32)

    def call(how: Any, convert: Convert) -> tuple[Any, Any]:
        given = [convert(array) for array in (q, k, v, blocks)]
        more = [] if suffix is None else [convert(array) for array in tail]
        return metal_kernels.gather_blocks(*given, block, *more, window=window, how=how)

    first = max(count - window, 0) if window else 0
    at = (picked[:, None] * block + np.arange(block)[None]).ravel()
    at = at[(at >= first) & (at < count)]
    keys, values = (np.concatenate([numbers(a)[:, at], numbers(b)], axis=1) for a, b in zip((k, v), tail, strict=True))
    kv_of = np.arange(heads * share) // share
    (out, lse), loudest = over(q[:, None].astype(np.float64), keys, values, kv_of, None, None)
    name = f"blocks of {block} D {dim} N {count} x{share} {dtype} window {window} suffix {suffix}"
    return Case(name, call, (out[:, 0], lse[:, 0]), loudest, float(np.abs(values).max()))


# ---- stored rows -----------------------------------------------------------------------------------------------------

FORMATS: Final = {
    "int8": 0,
    "fp8": 5,
    "mlx4g32": 7,
    "fp16": 2,
    "bf16": 9,
    "fp32": 8,
    "turbo4": 1,
    "turbo3": 3,
    "turbo2": 4,
}
KEY_FORMS: Final = {f"k{name}": FORMATS[name] + 16 for name in ("turbo4", "turbo3", "turbo2")}
FIRST: Final = 192  # position of the first row of the first block
THETA: Final = 1e4


@functools.cache
def _stored(rows: Rows, theta: float) -> tuple[Array, Array]:
    """Stored bytes, and what they decode to: (heads, count, head_dim)."""
    data, decoded = cases.stored(rows, FIRST + rows.skip, theta)
    return np.frombuffer(data, np.uint8), decoded[0].astype(np.float64)


def rows_of(name: str, dim: int, heads: int, count: int, *, skip: int = 0, turned: bool = False) -> Rows:
    code = {**FORMATS, **KEY_FORMS}[name]
    param = dim if "turbo" in name else 0
    return Rows(code | param << 8, heads, dim, count, count, skip if name in KEY_FORMS else 0, turned)


def stored(
    keys: str,
    values: str,
    dim: int,
    count: int,
    share: int,
    *,
    heads: int = 2,
    length: int = 1,
    skip: int = 0,
    turned: bool = False,
    window: int = 0,
    sinks: bool = False,
) -> Case:
    """`dense_rows`."""
    key_rows = rows_of(keys, dim, heads, count, skip=skip, turned=turned)
    value_rows = rows_of(values, dim, heads, count)
    key_bytes, k = _stored(key_rows, THETA if turned else 0.0)
    value_bytes, v = _stored(value_rows, 0.0)
    rng = np.random.default_rng([dim, count, share, length])
    # Some channels of the keys are 30 times as large as others.
    q = rng.normal(size=(heads * share, length, dim)).astype(np.float32) / np.float32(8)
    turns = metal_kernels.block_angles(FIRST + skip, count, THETA, dim) if turned else None
    logits = rng.normal(size=heads * share).astype(np.float32) if sinks else None

    def call(how: Any, convert: Convert) -> tuple[Any, Any]:
        return metal_kernels.dense_rows(
            convert(q),
            convert(key_bytes),
            key_rows,
            convert(value_bytes),
            value_rows,
            turns=None if turns is None else convert(turns),
            window=window,
            sinks=None if logits is None else convert(logits),
            how=how,
        )

    first = max(count - window, 0) if window else 0
    kv_of = np.arange(heads * share) // share
    want, loudest = over(q.astype(np.float64), k[:, first:], v[:, first:], kv_of, None, logits)
    name = f"{keys}/{values} D {dim} N {count} x{share} M {length} skip {skip} rope {turned} window {window}"
    return Case(name, call, want, loudest, float(np.abs(v).max()))
