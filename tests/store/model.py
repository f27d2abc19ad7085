"""The store as a plain dict: what every test compares the engine with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pion.limits import FORMATS

F32, F16, BF16, INT8 = FORMATS["fp32"], FORMATS["fp16"], FORMATS["bf16"], FORMATS["int8"]
STRIDE = {F32: 4, F16: 2, BF16: 2}


@dataclass
class Layer:
    """Stored words by position, and the length the layer reports."""

    rows: dict[int, bytes] = field(default_factory=dict)
    tokens: int = 0


@dataclass
class Side:
    """One session."""

    dim: int
    fmt: int
    layers: dict[int, Layer] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return max(self.layers, default=-1) + 1

    def store(self, layer: int, start: int, blob: bytes) -> None:
        """Words in the stored format."""
        size = self.dim * STRIDE[self.fmt]
        into = self.layers.setdefault(layer, Layer())
        for i in range(len(blob) // size):
            into.rows[start + i] = blob[i * size : (i + 1) * size]
        into.tokens = max(into.tokens, start + len(blob) // size)

    def fetch(self, layer: int, start: int, end: int) -> bytes | None:
        """Raw words, zeros in gaps; None when nothing of the range is there."""
        held = self.layers.get(layer)
        if held is None or start >= held.tokens:
            return None
        return b"".join(held.rows.get(row, bytes(self.dim * STRIDE[self.fmt])) for row in range(start, end))

    def trim(self, layer: int, length: int) -> None:
        held = self.layers.get(layer)
        if held is not None and held.tokens > length:
            held.tokens = length
            held.rows = {row: blob for row, blob in held.rows.items() if row < length}


@dataclass
class Entry:
    """One namespace or raw session."""

    sides: list[Side | None] = field(default_factory=lambda: [None, None])
    states: dict[int, bytes] = field(default_factory=dict)
    shape: tuple[int, int] | None = None
    digest: str | None = None
    blocks: tuple[int, bytes] | None = None

    @property
    def is_hit(self) -> bool:
        if None in self.sides:
            return False
        if self.shape is None:
            return True
        rows, layers = self.shape
        return all(
            side is not None
            and side.num_layers == layers
            and all(set(side.layers.get(n, Layer()).rows) == set(range(rows)) for n in range(layers))
            for side in self.sides
        )


def widen(blob: bytes | None, fmt: int) -> bytes | None:
    """Stored words as FP32."""
    if blob is None or fmt == F32:
        return blob
    words = np.frombuffer(blob, np.uint16)
    if fmt == F16:
        return words.view(np.float16).astype(np.float32).tobytes()
    return (words.astype(np.uint32) << 16).tobytes()


def words(seed: int, count: int, dim: int, fmt: int) -> bytes:
    """`count` rows of finite values in a format."""
    values = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    if fmt == F32:
        return values.tobytes()
    if fmt == F16:
        return values.astype(np.float16).tobytes()
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
