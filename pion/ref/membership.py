"""Membership of 64-bit block hashes in numpy: what `pion._core.membership` must answer."""

import numpy as np

MASK = (1 << 64) - 1


def probe(members: bytes, hashes: bytes) -> bytes:
    """One bit for each of `hashes` (8 bytes little-endian each), set when it is among `members`; LSB first."""
    found = np.isin(np.frombuffer(hashes, np.uint64), np.frombuffer(members, np.uint64))
    return np.packbits(found, bitorder="little").tobytes()


def home(value: int, key: int, slots: int) -> int:
    """First slot of the home bucket of a hash, in a table with this key and that many slots (a power of two)."""
    return (value * key & MASK) * slots >> 64 & ~3
