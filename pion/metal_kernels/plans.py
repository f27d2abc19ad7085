"""What the attention kernels have in common: checks, heads, and how work is dealt out to threadgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion.metal_kernels.device import Device, Metal

__all__ = ["GROUPS", "MOST_DIM", "Heads", "Slots", "check", "device_of", "kv_heads", "scale_bits", "splits_of"]

MOST_DIM: Final = 512

# Sizes that were chosen by reasoning and have not been measured: there was no Mac.
GROUPS: Final = 8  # SIMD groups of a threadgroup
_AT_ONCE: Final = 256  # threadgroups that shall be there for a GPU to be busy
_LEAST: Final = 256  # keys that are worth a threadgroup
_MOST_SPLITS: Final = 64

Heads = Sequence[int] | NDArray[Any] | bytes | None


def device_of(how: str | Device) -> Device:
    """The device; ValueError for a name that is none, RuntimeError when Metal is asked for and not there."""
    if not isinstance(how, str):
        return how
    if how != "metal":
        raise ValueError(f"how is {how!r}, not 'metal' or 'ops'")
    import mlx.core as mx

    if not mx.metal.is_available():
        raise RuntimeError("no Metal on this machine: use how='ops'")
    return Metal()


def kv_heads(heads: int, stored: int, head_map: Heads) -> NDArray[np.uint32]:
    """The head of keys of each query head.

    Raises:
        ValueError: a map of another length or with other heads, or H_q that H does not divide.
    """
    if head_map is None:
        if stored < 1 or heads % stored:
            raise ValueError(f"{heads} query heads are not a multiple of {stored} heads of keys")
        return (np.arange(heads) // (heads // stored)).astype(np.uint32)
    given = np.frombuffer(head_map, np.uint8) if isinstance(head_map, bytes) else np.asarray(head_map)
    if given.shape != (heads,):
        raise ValueError(f"the head map has shape {given.shape}, not ({heads},)")
    if given.size and not (given.min() >= 0 and given.max() < stored):
        raise ValueError(f"the head map names heads outside 0..{stored - 1}")
    return given.astype(np.uint32)


@dataclass(frozen=True)
class Slots:
    """Query rows that share a head of keys lie side by side: `rows` of each slot, whose head is in `kv_of`."""

    kv_of: NDArray[np.uint32]
    rows: int

    @classmethod
    def of(cls, kv_of: NDArray[np.uint32], stored: int, length: int, *, alone: bool = False) -> Slots:
        """A slot for each head of keys where the query heads come in their order, else (`alone`: always) for each
        query head."""
        heads = len(kv_of)
        share = heads // stored
        if not alone and heads == share * stored and np.array_equal(kv_of, np.arange(heads) // max(share, 1)):
            return cls(np.arange(stored, dtype=np.uint32), share * length)
        return cls(kv_of, length)

    def at_once(self, dim: int) -> int:
        """Query rows that a threadgroup takes: a power of two, 32 registers of a thread at most."""
        most = max(1, 32 // -(-dim // 32))
        return min(1 << (self.rows - 1).bit_length(), most, 8)


def splits_of(places: int, groups: int, step: int) -> tuple[int, int]:
    """How many threadgroups share the keys of a row, and the keys of each: a multiple of `step`."""
    wanted = max(1, min(_AT_ONCE // groups, _MOST_SPLITS, -(-places // _LEAST)))
    each = -(-max(places, 1) // wanted)
    each = -(-each // step) * step
    return max(1, -(-places // each)), each


def scale_bits(scale: float | None, dim: int) -> int:
    """A scale as the word of a float32."""
    return int(np.float32(dim**-0.5 if scale is None else scale).view(np.uint32))


def check(q: Any, k: Any, v: Any) -> None:
    """Refuse shapes that do not fit: q (H_q, M, D), k and v (H, N, D)."""
    if len(q.shape) != 3 or len(k.shape) != 3 or k.shape != v.shape or k.shape[2] != q.shape[2] or 0 in q.shape:
        raise ValueError(f"queries {q.shape}, keys {k.shape} and values {v.shape} do not fit")
    if not 1 <= q.shape[2] <= MOST_DIM:
        raise ValueError(f"heads of {q.shape[2]} values: 1 to {MOST_DIM} are supported")
    if k.size >= 1 << 32:
        raise ValueError(f"{k.size} values of keys: fewer than {1 << 32} are supported")
