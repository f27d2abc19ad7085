"""Readable twin of `pion._core.prefixtree`: which stored prefixes share most blocks with what is asked for.

Blocks are named by chained hashes, so equal hashes at equal places mean equal blocks before them.
"""

from __future__ import annotations

__all__ = ["PrefixTree"]


class PrefixTree:
    """Prefixes as tuples of hashes, compared one by one."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def add(self, prefix: int, hashes: bytes) -> None:
        """Put a prefix in, in the place of what had its number; `hashes` are u64, little-endian."""
        self.remove(prefix)
        if hashes:
            self._held[prefix] = _unpacked(hashes)

    def remove(self, prefix: int) -> None:
        """Take a prefix out, if it is there."""
        self._held.pop(prefix, None)

    def shared(self, hashes: bytes) -> dict[int, int]:
        """Blocks shared by prefix, of those that share any."""
        asked = _unpacked(hashes)
        return {prefix: n for prefix, held in self._held.items() if (n := _common(held, asked))}

    def __len__(self) -> int:
        return len({held[:n] for held in self._held.values() for n in range(1, len(held) + 1)})


def _unpacked(hashes: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(hashes[i : i + 8], "little") for i in range(0, len(hashes), 8))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n
