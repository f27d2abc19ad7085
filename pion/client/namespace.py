"""Names and hashes that must be equal in every process, on every machine, under every hash seed.

A namespace names one exact prefix for one model and format. Python's ``hash`` is never used here: it differs from
process to process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

__all__ = ["hash_block", "hash_blocks", "legacy_namespace", "make_namespace", "token_array"]

_NONE = "\\N"  # no escaped part contains it: a backslash in a part is always followed by "\\" or "|"


def make_namespace(*parts: str | None) -> str:
    """The key of a prefix: the first 32 hex digits of SHA-256 over the parts joined by ``|``.

    Inside a part ``\\`` and ``|`` are escaped, so different parts never give the same key: ``("a|b", "c")`` and
    ``("a", "b|c")`` differ, and so do ``None`` (there is no adapter) and ``""``. For parts without these two characters
    the key is the one the published client makes.

    Recommended parts: model id, tokenizer hash, rope settings, format, adapter id, prompt.

    Raises:
        TypeError: a part is neither ``str`` nor ``None``.
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("make_namespace needs at least one part")
    escaped = []
    for position, part in enumerate(parts):
        if part is None:
            escaped.append(_NONE)
        elif isinstance(part, str):
            escaped.append(part.replace("\\", "\\\\").replace("|", "\\|"))
        else:
            raise TypeError(f"part {position} of a namespace must be str or None, not {type(part).__name__}")
    return hashlib.sha256("|".join(escaped).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def legacy_namespace(*parts: str) -> str:
    """The published client's key, for entries it made from parts that contain ``|`` or ``\\``. Not injective."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]


def token_array(token_ids: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Token ids as a contiguous u32 array.

    Args:
        token_ids: a flat sequence, numpy or mlx array of integers in 0 .. 2**32 - 1.

    Raises:
        TypeError: the ids are not integers.
        ValueError: not one-dimensional, or an id out of range.
    """
    if isinstance(token_ids, str | bytes):
        raise TypeError("token ids are needed, not text: tok.encode(text)")
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise ValueError(f"token ids must be a flat sequence, got {ids.ndim} dimensions")
    if not ids.size:
        return np.empty(0, "<u4")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() > 0xFFFFFFFF:
        raise ValueError("a token id is out of range (0 .. 2**32 - 1)")
    return np.ascontiguousarray(ids, "<u4")


def hash_block(tokens: Any, parent: int = 0) -> int:
    """A u64 that names a block of tokens and everything before it.

    The hash is BLAKE2b-64 over the parent's hash (u64, little endian) and the ids (u32, little endian). It is a hint
    for routers (``KV.PREFIX.MEMBERSHIP``); whether a prefix is the right one is decided by its digest.

    Args:
        tokens: the ids of this block.
        parent: the hash of the block before it; 0 for the first one.
    """
    return _hash(token_array(tokens).tobytes(), parent)


def _hash(block: bytes, parent: int) -> int:
    hasher = hashlib.blake2b(parent.to_bytes(8, "little"), digest_size=8, person=b"pion block")
    hasher.update(block)
    return int.from_bytes(hasher.digest(), "little")


def hash_blocks(tokens: Any, block_size: int = 64) -> list[int]:
    """The chained hashes of all full blocks of a token sequence, in order; a shorter rest at the end is left out."""
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    ids, hashes, parent = token_array(tokens).tobytes(), [], 0
    width = 4 * block_size
    for start in range(0, len(ids) - width + 1, width):
        parent = _hash(ids[start : start + width], parent)
        hashes.append(parent)
    return hashes
