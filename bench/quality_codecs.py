"""What the quality harness puts in the place of a cache: rows sent through the compiled row formats and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pion._core import quant, quantkeys

F32 = NDArray[np.float32]

GROUP: Final = 64  # rows of a key group
CODES: Final = {
    "fp32": 8,
    "fp16": 2,
    "bf16": 9,
    "int8": 0,
    "fp8": 5,
    "mlx4g32": 7,
    "turbo4": 1,
    "turbo3": 3,
    "turbo2": 4,
}
TURBO: Final = ("turbo4", "turbo3", "turbo2")
KEY_FORM: Final = 16  # what is added to a turbo code for side K of a prefix
ROWS: Final = "-rows"  # suffix: turbo's row form on side K too, to show what the key form is for


@dataclass(frozen=True)
class Layer:
    """Rows of one layer of one prefix, on one side.

    Attributes:
        rows: (n, heads * head size), as the cache holds them: keys after RoPE.
        head: head size.
        first: position of the first row in the sequence.
        theta: base of the layer's RoPE.
    """

    rows: F32
    head: int
    first: int
    theta: float


@dataclass(frozen=True)
class Split:
    """Formats of the two sides. In the first and last `protect` layers V is fp16, as boundary_protect stores it."""

    k: str
    v: str
    protect: int = 0

    @classmethod
    def parse(cls, text: str) -> Split:
        """``K/V`` or ``K/V@layers``, for example ``int8/turbo4`` and ``fp16/turbo3@2``.

        Raises:
            ValueError: not of that form, or a format that does not exist; the text names those that do.
        """
        pair, _, protect = text.partition("@")
        k, slash, v = pair.partition("/")
        known = [*CODES, *(name + ROWS for name in TURBO)]
        if not slash or k not in known or v not in CODES or not (protect or "0").isdigit():
            raise ValueError(f"{text!r} is not K/V or K/V@layers of {', '.join(known)}")
        return cls(k, v, int(protect or 0))

    def __str__(self) -> str:
        return f"{self.k}/{self.v}" + (f"@{self.protect}" if self.protect else "")

    def formats(self, layers: int) -> tuple[list[str], list[str]]:
        """Formats of K and of V in each layer."""
        inner = range(self.protect, layers - self.protect)
        return [self.k] * layers, [self.v if i in inner else "fp16" for i in range(layers)]


def _whole(rows: F32, code: int) -> tuple[F32, int]:
    """Rows that stand for themselves."""
    dim = rows.shape[1]
    stored = quant.encode(quant.FP32, code, np.ascontiguousarray(rows), dim)
    return np.frombuffer(quant.decode(code, stored, dim), np.float32).reshape(rows.shape), len(stored)


def _keys(layer: Layer, code: int) -> tuple[F32, int]:
    """The key form: groups of 64 positions; rows before the first whole group and behind the last stay in fp16."""
    n, dim = layer.rows.shape
    start = min(n, -layer.first % GROUP)
    end = start + (n - start) // GROUP * GROUP
    loose = [_whole(layer.rows[part], quant.FP16) for part in (slice(0, start), slice(end, n))]
    middle, size = layer.rows[start:end], 0
    if end > start:
        fmt, first = quant.pack_format(code, layer.head), layer.first + start
        stored = quantkeys.encode_keys(quant.FP32, fmt, np.ascontiguousarray(middle), dim, first, layer.theta)
        size = len(stored)
        decoded = quantkeys.decode_keys(fmt, stored, dim, first, layer.theta)
        middle = np.frombuffer(decoded, np.float32).reshape(middle.shape)
    return np.concatenate([loose[0][0], middle, loose[1][0]]), size + loose[0][1] + loose[1][1]


def through(layer: Layer, fmt: str, *, keys: bool) -> tuple[F32, int]:
    """What a store hands out for these rows, and how many bytes it keeps for them, everything counted.

    Args:
        layer: the rows.
        fmt: a name of `CODES`; on side K turbo formats are key forms unless the name ends in ``-rows``.
        keys: side K.

    Returns:
        (rows, fp32, of the same shape; stored bytes).
    """
    name = fmt.removesuffix(ROWS)
    code = CODES[name]
    if name not in TURBO:
        return _whole(layer.rows, code)
    if keys and name == fmt:
        return _keys(layer, code + KEY_FORM)
    return _whole(layer.rows, quant.pack_format(code, layer.head))


def digest(arrays: Sequence[F32]) -> list[str]:
    """A short digest of each array's bytes: equal rows need not be measured twice."""
    return [hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest() for array in arrays]
