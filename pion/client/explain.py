"""Why a prefix is used or not: the receipt of a near miss."""

from __future__ import annotations

import struct
from typing import Any, Final, NotRequired, TypedDict

import numpy as np

from pion.client.caches import Layout
from pion.client.connection import Flight, Steps
from pion.client.errors import IncompleteError
from pion.client.namespace import hash_blocks
from pion.client.reuse import Candidate, Ids, compare, find, worth
from pion.client.transfer import lines_of, match_command, names_of, read
from pion.errors import CommandError, utf8

__all__ = ["BLOCK", "Explanation", "block_table", "explain", "receipt"]

#: Tokens of a block whose hash is stored with a prefix: how exactly a difference can be placed.
BLOCK: Final = 16


class Explanation(TypedDict):
    """What would become of a request, or became of it.

    Attributes:
        tokens: asked for.
        stored: tokens that the namespace holds; 0 = it holds nothing.
        reused: tokens that would be fetched and not computed.
        shared: leading tokens that are the same in what is asked and what is stored; in whole blocks when what is
            stored does not say its tokens.
        first_difference: (from, to): the first difference is at one of these tokens; None when there is none or it is
            not known.
        differing: (stored, asked): the two token ids there; None where one of the two ends, or it is not known.
        source: the namespace that tokens would be fetched from; None when none would.
        reason: a sentence.
        attend: with ``stage2``: what the server holds of the namespace for attention: ``warm``, ``cold``, ``missing``.
    """

    tokens: int
    stored: int
    reused: int
    shared: int
    first_difference: tuple[int, int] | None
    differing: tuple[int, int] | None
    source: str | None
    reason: str
    attend: NotRequired[str]


def block_table(ids: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    """The argument BLOCKS of a REGISTER: block size, and chained u64 hashes of the whole blocks."""
    return BLOCK, np.array(hash_blocks(ids, BLOCK), "<u8").tobytes()


def receipt(tokens: int, reason: str) -> Explanation:
    """The receipt of a request for which nothing is of use."""
    return Explanation(
        tokens=tokens, stored=0, reused=0, shared=0, first_difference=None, differing=None, source=None, reason=reason
    )


def note(out: Explanation, candidate: Candidate, ids: Ids, *, may_reuse: bool) -> None:
    """Write down what an entry is beside what is asked for."""
    same = candidate.shared
    out["stored"], out["shared"], out["reason"] = candidate.stored, same, candidate.reason
    out["differing"] = candidate.differing(ids)
    out["first_difference"] = None if same == len(ids) == candidate.stored else (same, same)
    if may_reuse and worth(candidate, ids):
        out["reused"], out["source"] = candidate.usable, candidate.entry.namespace


def explain(
    namespace: str, digest: str, ids: Ids, identity: str, layout: Layout, near: tuple[str, bytes], *, own: bool
) -> Steps[Explanation]:
    """Compare what is asked for with what a namespace holds; nothing is booked as a hit or a miss.

    Args:
        digest: of the ids and of `identity`.
        ids: (tokens,) u4.
        identity, layout: of the cache that is asked for.
        near: scope and hashes of blocks, to find other prefixes that begin alike.
        own: whether tokens of this namespace would be reused when it holds others too.
    """
    name = utf8(namespace, "the namespace")
    first: list[list[Any]] = [["KV.PREFIX.WHY", name], ["KV.PREFIX.BLOCKS", name]]
    first += [["V.INFO", name + b"_pk"], match_command(near)]
    why, table, info, names = yield Flight(first)
    if not isinstance(why, bytes | str):
        raise CommandError(str(why))
    reason = why.decode("utf-8", "replace") if isinstance(why, bytes) else why
    out = receipt(len(ids), reason)
    if isinstance(info, bytes):
        lines = lines_of(info)
        entry = None
        try:
            entry = yield from read(namespace)
        except IncompleteError as error:
            out["reason"] = str(error)
        if lines.get("digest") == digest:
            out["stored"], out["shared"] = int(lines.get("rows", lines.get("layer_0_tokens", 0))), len(ids)
            if reason.startswith("hit"):
                out["reused"], out["source"] = len(ids), namespace
                return out
        elif entry is not None:
            note(out, compare(entry, identity, layout, ids), ids, may_reuse=own)
        else:
            out["stored"] = int(lines.get("layer_0_tokens", 0))
            _by_blocks(out, table, ids)
    others = [name for name in names_of(names) if name != namespace]
    found = yield from find(others, identity, layout, ids)
    if found and found[0].usable > out["reused"] and worth(found[0], ids):
        held, said = out["stored"], out["reason"]
        note(out, found[0], ids, may_reuse=True)
        out["stored"] = held
        out["reason"] = f"{said}; {found[0].entry.namespace}: {found[0].reason}"
    return out


def _by_blocks(out: Explanation, table: Any, ids: Ids) -> None:
    """The difference to rows whose writer left hashes of their blocks and not the tokens."""
    if not isinstance(table, bytes) or len(table) <= 8:
        out["reason"] = "other tokens or another model's are stored, without hashes of the tokens"
        return
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
