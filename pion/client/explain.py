"""Why a prefix is used or not: the receipt of a near miss."""

from __future__ import annotations

import struct
from typing import Any, Final, TypedDict

import numpy as np

from pion.client.connection import Flight, Steps
from pion.client.namespace import hash_blocks
from pion.errors import CommandError, utf8

__all__ = ["BLOCK", "Explanation", "block_table", "explain"]

#: Tokens of a block whose hash is stored with a prefix: how exactly a difference can be placed.
BLOCK: Final = 16


class Explanation(TypedDict):
    """What would become of a request.

    Attributes:
        tokens: asked for.
        stored: tokens that the namespace holds; 0 = it holds nothing.
        reused: tokens that would be fetched: all or none.
        shared: leading tokens, in whole blocks, that are the same in what is asked and what is stored.
        first_difference: (from, to): the first difference is at one of these tokens; None when there is none or it is
            not known.
        reason: a sentence.
    """

    tokens: int
    stored: int
    reused: int
    shared: int
    first_difference: tuple[int, int] | None
    reason: str


def block_table(ids: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    """The argument BLOCKS of a REGISTER: block size, and chained u64 hashes of the whole blocks."""
    return BLOCK, np.array(hash_blocks(ids, BLOCK), "<u8").tobytes()


def explain(namespace: str, digest: str, ids: np.ndarray[Any, Any]) -> Steps[Explanation]:
    """Compare what is asked for with what a namespace holds; nothing is booked as a hit or a miss.

    Args:
        digest: of the ids and the model.
        ids: (tokens,) u4.
    """
    name = utf8(namespace, "the namespace")
    why, table, info = yield Flight([["KV.PREFIX.WHY", name], ["KV.PREFIX.BLOCKS", name], ["V.INFO", name + b"_pk"]])
    if not isinstance(why, bytes | str):
        raise CommandError(str(why))
    reason = why.decode() if isinstance(why, bytes) else why
    out = Explanation(tokens=len(ids), stored=0, reused=0, shared=0, first_difference=None, reason=reason)
    if not isinstance(info, bytes):
        return out
    lines = dict(line.partition(":")[::2] for line in info.decode().splitlines())
    out["stored"] = int(lines.get("layer_0_tokens", 0))
    if lines.get("digest") == digest:
        out["shared"] = len(ids)
        out["reused"] = len(ids) if reason.startswith("hit") else 0
        return out
    if not isinstance(table, bytes) or len(table) <= 8:
        out["reason"] = "other tokens or another model's are stored, without hashes of the tokens"
        return out
    size, _ = struct.unpack_from("<II", table)
    held = np.frombuffer(table, "<u8", offset=8)
    asked = np.array(hash_blocks(ids, size), "<u8")
    most = min(len(held), len(asked))
    same = int(np.argmin(np.append(held[:most] == asked[:most], False)))
    out["shared"] = same * size
    if same < most:
        out["first_difference"] = (same * size, (same + 1) * size - 1)
        what = f"tokens {same * size} to {(same + 1) * size - 1} are not those that are stored"
    elif len(ids) == out["stored"]:
        what = f"the first {same * size} tokens are those that are stored: the rest, or the model, is another"
    else:
        end = min(len(ids), out["stored"])
        out["first_difference"] = (same * size, end)
        what = f"{len(ids)} tokens are asked for, {out['stored']} are stored, of which the first {same * size} agree"
    out["reason"] = what
    return out
