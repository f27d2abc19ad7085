"""One prefix over the wire: looked up, registered, stored and fetched, as steps for a connection pool.

A store is one flight of commands behind its REGISTER, packed as the socket takes them. How the rows of a fetch come is
the matter of lanes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from pion.client import caches
from pion.client.caches import Layout
from pion.client.connection import Command, Flight, Steps, expect_ok, raise_first
from pion.client.errors import IncompleteError
from pion.client.formats import KEPT, Sides, described, registration
from pion.client.lanes import Lanes
from pion.errors import CommandError, MismatchError

__all__ = ["Rows", "fetch", "formats_of", "lookup", "packed", "register", "send"]

_WIRE: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}

Rows = Iterable[tuple[int, int, np.ndarray[Any, Any]]]
"""(layer, side, rows) of a prompt cache; side 0 = K, 1 = V."""


def lookup(namespace: str, digest: str | None, *, describe: bool = False) -> Steps[tuple[bool, list[Any]]]:
    """Whether the server has the whole prefix; with `describe`, also the V.INFO of both sides, for `fetch`.

    Raises:
        MismatchError: it is there for another digest.
    """
    command: list[Any] = ["KV.PREFIX.LOOKUP", namespace, *(["DIGEST", digest] if digest else [])]
    found, *about = yield Flight([command, *(_infos(namespace) if describe else ())])
    raise_first([found])
    return found == "HIT", about


def register(
    namespace: str, layout: Layout, sides: Sides, rows: int, digest: str, prefill_ms: int, blocks: tuple[int, bytes],
    *, replace: bool,
) -> Steps[None]:  # fmt: skip
    """Declare a prefix: shape, formats, what a row is, whose it is, and hashes of its blocks of tokens.

    Raises:
        MismatchError: the namespace holds something else, and not `replace`.
    """
    command = registration(namespace, layout.kv_dim, sides)
    size, hashes = blocks
    if hashes:
        command += ["BLOCKS", size, len(hashes) // 8, hashes]
    command += ["PREFILL_MS", prefill_ms, "ROWS", rows, "LAYERS", layout.cache_len, "DIGEST", digest]
    command += ["HEADS", layout.n_kv_heads, "HEAD_DIM", layout.head_dim]
    command += ["ROPE", "NONE" if layout.rope is None else f"{layout.rope:g}"]
    (reply,) = yield Flight([[*command, "REPLACE"] if replace else command])
    expect_ok(reply, str(command[0]))


def packed(cache: list[Any], rows: int) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """The rows of a prompt cache, packed one layer-side at a time as they are asked for."""
    for layer, state in enumerate(cache):
        yield layer, 0, caches.pack_rows(state.keys, rows)
        yield layer, 1, caches.pack_rows(state.values, rows)


def send(namespace: str, digest: str, dtype: str, count: int, rows: Rows) -> Steps[None]:
    """Store rows in the words the model has; the server turns them into the format of the entry.

    Raises:
        CommandError: the first refusal. A prefix that is incomplete by it is dropped again.
        IncompleteError: the entry was replaced meanwhile and may now hold rows of two prefixes. It was dropped.
    """

    def commands() -> Iterator[Command]:
        for layer, side, data in rows:
            yield "V.STOREBATCH", _sids(namespace)[side], layer, 0, count, data.data, "FMT", _WIRE[dtype]

        yield from _infos(namespace)

    *stored, keys, values = yield Flight(commands())
    if not all(isinstance(info, bytes) and _lines(info).get("digest") == digest for info in (keys, values)):
        raise_first([*stored, keys, values])
        yield Flight([["KV.PREFIX.DROP", namespace]])
        raise IncompleteError("the namespace was given to something else meanwhile; it was dropped")
    try:
        for reply in stored:
            expect_ok(reply, "V.STOREBATCH")
    except CommandError:
        layers = len(stored) // 2
        if not all(_whole(_lines(info), layers, count) for info in (keys, values)):
            yield Flight([["KV.PREFIX.DROP", namespace]])
        raise


def _whole(lines: dict[str, str], layers: int, count: int) -> bool:
    return all(lines.get(f"layer_{layer}_tokens") == str(count) for layer in range(layers))


def _described(info: Any, digest: str, layout: Layout, count: int, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The format of each layer in a V.INFO reply, if the session is what this model can use."""
    lines = _lines(info)
    held = described(lines)
    if held != tuple((layout.kv_dim, fmt) for _, fmt in held) or len(held) != layout.cache_len:
        dims = "/".join(dict.fromkeys(str(dim) for dim, _ in held))
        here = f"{layout.cache_len} layers of {layout.kv_dim}"
        raise MismatchError(f"MISMATCH shape: {len(held)} layers of {dims} values are stored, this model has {here}")
    kept = KEPT[layout.dtype]  # words kept as they were serve any request
    for layer, ((_, fmt), asked) in enumerate(zip(held, wanted, strict=True)):
        if fmt not in (asked, kept):
            where = "" if len({*held}) == 1 == len({*wanted}) else f" (layer {layer})"
            allowed = " or ".join(sorted({asked, kept}))
            raise MismatchError(f"MISMATCH format: stored as {fmt}, asked for as {allowed}{where}")
    if lines.get("digest") != digest:
        raise IncompleteError("the prefix was replaced behind the lookup")
    short = [layer for layer in range(layout.cache_len) if lines.get(f"layer_{layer}_tokens") != str(count)]
    if short:
        raise IncompleteError(f"layers {short} do not hold {count} rows")
    return tuple(fmt for _, fmt in held)


def formats_of(infos: list[Any], digest: str, layout: Layout, count: int, wanted: Sides) -> Sides:
    """The formats that the layers are stored in, by V.INFO of both sides, when they are what this model can use.

    Raises:
        MismatchError, IncompleteError, CommandError: as `fetch` does.
    """
    raise_first(infos)
    keys, values = (_described(info, digest, layout, count, asked) for info, asked in zip(infos, wanted, strict=True))
    return keys, values


def fetch(
    namespace: str, digest: str, infos: list[Any], model: Any, layout: Layout, wanted: Sides, count: int, lanes: Lanes,
) -> Steps[list[Any]]:  # fmt: skip
    """Fetch all rows of a prefix into a fresh prompt cache.

    Args:
        namespace, digest: the prefix.
        infos: what `lookup` said about it.
        model, layout: what the cache is for.
        wanted: the formats asked for.
        count: tokens of the prefix.
        lanes: the ways to the server.

    Returns:
        The cache, holding exactly `count` tokens.

    Raises:
        MismatchError: the shape or the format is not this model's.
        IncompleteError: rows are missing, or the prefix was replaced meanwhile. No cache was built.
        CommandError: the server refused.
    """
    formats = formats_of(infos, digest, layout, count, wanted)
    pairs = yield from lanes.fetch(namespace, digest, infos, formats, layout, count)
    return caches.filled(model, pairs, count)


def _lines(info: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)


def _infos(namespace: str) -> list[Command]:
    return [["V.INFO", sid] for sid in _sids(namespace)]


def _sids(namespace: str) -> tuple[bytes, bytes]:
    return namespace.encode() + b"_pk", namespace.encode() + b"_pv"
