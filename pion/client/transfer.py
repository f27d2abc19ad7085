"""One prefix over the wire: registered, stored and fetched by a `Link`.

Everything is pipelined: a store is one flight of commands, whose replies are taken in while the rest is written; a
fetch is one flight of four commands, whose rows are received into one reused buffer and copied from there into the
model's arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from pion.client import caches
from pion.client.caches import Layout
from pion.client.link import Link, encode
from pion.errors import CommandError, MismatchError
from pion.limits import FORMATS

__all__ = ["UnusableError", "fetch", "register", "send_rows", "stored_format"]

_SIDES: Final = (b"_pk", b"_pv")
_KEPT: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # the format that keeps the words
_WIRE: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


class UnusableError(Exception):
    """The server said HIT, but what it then sent is not the whole prefix."""


def stored_format(vquant: str, dtype: str) -> str:
    """The format a model of this dtype is stored in: 16-bit models keep their words under ``fp16`` as well."""
    if vquant == "native" or (vquant == "fp16" and dtype == "bfloat16"):
        return _KEPT[dtype]
    return vquant


def register(
    link: Link, namespace: str, layout: Layout, fmt: str, rows: int, digest: str, prefill_ms: int, *, replace: bool
) -> None:
    """Declare a prefix: shape, format, what a row is, and whose it is.

    Raises:
        MismatchError: the namespace holds something else, and not `replace`.
    """
    link.execute(
        *("KV.PREFIX.REGISTER", namespace, layout.kv_dim, fmt, "PREFILL_MS", prefill_ms),
        *("ROWS", rows, "LAYERS", layout.cache_len, "DIGEST", digest),
        *("HEADS", layout.n_kv_heads, "HEAD_DIM", layout.head_dim),
        *("ROPE", "NONE" if layout.rope is None else f"{layout.rope:g}"),
        *(["REPLACE"] if replace else []),
    )


def packed(cache: list[Any], rows: int) -> Iterable[tuple[int, int, np.ndarray[Any, Any]]]:
    """(layer, side, rows) of a prompt cache, packed one by one as they are asked for."""
    for layer, state in enumerate(cache):
        yield layer, 0, caches.pack_rows(state.keys, rows)
        yield layer, 1, caches.pack_rows(state.values, rows)


def send_rows(
    link: Link, namespace: str, dtype: str, rows: int, sides: Iterable[tuple[int, int, np.ndarray[Any, Any]]]
) -> None:
    """Store rows in the words the model has; the server turns them into the format of the entry.

    Raises:
        CommandError: the first refusal; what was sent after it does not count, the prefix stays incomplete (a MISS).
    """
    with link.session():
        failed: CommandError | None = None
        for layer, side, data in sides:
            sid = namespace.encode() + _SIDES[side]
            link.send(encode(["V.STOREBATCH", sid, layer, 0, rows, data, "FMT", _WIRE[dtype]]))
            while link.has_line() and failed is None:
                failed = link.refusal()
            if failed:
                break
        while link.owed:
            failed = link.refusal() or failed
        if failed:
            raise failed


def _described(link: Link, layout: Layout, rows: int, allowed: set[str]) -> int:
    """Read one V.INFO reply and return the format code, if the session is what this model can use."""
    lines = dict(line.split(":", 1) for line in link.value().decode().split("\r\n") if ":" in line)
    dim, layers, fmt = lines.get("value_dim"), lines.get("num_layers"), lines.get("v_format", "")
    if dim != str(layout.kv_dim) or layers != str(layout.cache_len):
        raise MismatchError(f"MISMATCH shape: stored {layers} layers of {dim} values, this model has {layout}")
    if fmt not in allowed:
        raise MismatchError(f"MISMATCH format: stored as {fmt}, this client asks for {' or '.join(sorted(allowed))}")
    short = [layer for layer in range(layout.cache_len) if lines.get(f"layer_{layer}_tokens") != str(rows)]
    if short:
        raise UnusableError(f"layers {short} do not hold {rows} rows")
    return FORMATS[fmt]


def fetch(link: Link, namespace: str, model: Any, layout: Layout, vquant: str, rows: int) -> list[Any]:
    """Fetch all rows of a prefix into a fresh prompt cache.

    Returns:
        The cache, holding exactly `rows` tokens.

    Raises:
        MismatchError: the shape or the format is not this model's.
        UnusableError: rows are missing or the reply is not of the promised size. No cache was built.
        CommandError, OSError: the server refused, or was lost.
    """
    # Words kept as they were serve any request; otherwise the format must be the one asked for.
    allowed = {stored_format(vquant, layout.dtype), _KEPT[layout.dtype]}
    sids = [namespace.encode() + side for side in _SIDES]
    with link.session():
        asked: list[list[Any]] = [["V.INFO", sid] for sid in sids]
        asked += [["V.FETCH", sid, "BATCH", 0, rows, layout.cache_len, "FMT", "RAW"] for sid in sids]
        link.send([b"".join(piece for command in asked for piece in encode(command))], replies=len(asked))
        restorer = caches.Restorer(model, layout, rows)  # its memory is prepared while the server reads
        codes = [_described(link, layout, rows, allowed) for _ in _SIDES]
        buffer: Any = np.empty(0, np.uint8)
        for side, code in enumerate(codes):
            size = restorer.row_bytes(code) * rows
            if len(buffer) < size:
                buffer = np.empty(size, np.uint8)
            target = memoryview(buffer)[:size]
            if link.header(b"*") != layout.cache_len:
                raise UnusableError("the reply has another number of layers than the model")
            for layer in range(layout.cache_len):
                got = link.header(b"$")
                if got != size:
                    raise UnusableError(f"layer {layer} has {got} bytes instead of {size}")
                link.read_into(target)
                link.end_bulk()
                restorer.place(layer, side, code, target)
            link.done()
    return restorer.finish()
