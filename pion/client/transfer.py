"""One prefix over the wire: looked up, registered, stored and fetched, as steps for a connection pool.

A store is one flight of commands behind its REGISTER, packed as the socket takes them. A fetch is one flight of five
commands: all rows of K and of V are asked for at once, received layer by layer into one buffer, and copied from there
into the model's arrays while the next ones travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from pion.client import caches
from pion.client.caches import Layout
from pion.client.connection import Command, Flight, Steps, expect_ok, raise_first
from pion.client.errors import IncompleteError
from pion.errors import MismatchError

__all__ = ["Rows", "fetch", "lookup", "packed", "register", "send", "stored_format"]

_KEPT: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # the format that keeps the words
_WIRE: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}

Rows = Iterable[tuple[int, int, np.ndarray[Any, Any]]]
"""(layer, side, rows) of a prompt cache; side 0 = K, 1 = V."""


def stored_format(vquant: str, dtype: str) -> str:
    """The format a model of this dtype is stored in: 16-bit models keep their words under ``fp16`` as well."""
    if vquant == "native" or (vquant == "fp16" and dtype == "bfloat16"):
        return _KEPT[dtype]
    return vquant


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
    namespace: str, layout: Layout, fmt: str, rows: int, digest: str, prefill_ms: int, *, replace: bool
) -> Steps[None]:
    """Declare a prefix: shape, format, what a row is, and whose it is.

    Raises:
        MismatchError: the namespace holds something else, and not `replace`.
    """
    command: list[Any] = ["KV.PREFIX.REGISTER", namespace, layout.kv_dim, fmt]
    command += ["PREFILL_MS", prefill_ms, "ROWS", rows, "LAYERS", layout.cache_len, "DIGEST", digest]
    command += ["HEADS", layout.n_kv_heads, "HEAD_DIM", layout.head_dim]
    command += ["ROPE", "NONE" if layout.rope is None else f"{layout.rope:g}"]
    (reply,) = yield Flight([[*command, "REPLACE"] if replace else command])
    expect_ok(reply, "KV.PREFIX.REGISTER")


def packed(cache: list[Any], rows: int) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """The rows of a prompt cache, packed one layer-side at a time as they are asked for."""
    for layer, state in enumerate(cache):
        yield layer, 0, caches.pack_rows(state.keys, rows)
        yield layer, 1, caches.pack_rows(state.values, rows)


def send(namespace: str, digest: str, dtype: str, count: int, rows: Rows) -> Steps[None]:
    """Store rows in the words the model has; the server turns them into the format of the entry.

    Raises:
        CommandError: the first refusal. The prefix stays incomplete, which is a MISS for everybody.
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
    for reply in stored:
        expect_ok(reply, "V.STOREBATCH")


def _described(info: Any, digest: str, layout: Layout, count: int, allowed: set[str]) -> None:
    """A V.INFO reply must describe a session that this model can use."""
    lines = _lines(info)
    count_here = range(layout.cache_len)
    # Layer by layer where they differ, else the session's.
    dims = {lines.get(f"layer_{i}_dim", lines["value_dim"]) for i in count_here}
    formats = {lines.get(f"layer_{i}_fmt", lines["v_format"]) for i in count_here}
    layers = lines["num_layers"]
    if (dims, layers) != ({str(layout.kv_dim)}, str(layout.cache_len)):
        here = f"{layout.cache_len} layers of {layout.kv_dim}"
        there = " or ".join(sorted(dims))
        raise MismatchError(f"MISMATCH shape: {layers} layers of {there} values are stored, this model has {here}")
    if not formats <= allowed:
        asked = " or ".join(sorted(allowed))
        raise MismatchError(f"MISMATCH format: stored as {'/'.join(sorted(formats))}, asked for as {asked}")
    if lines.get("digest") != digest:
        raise IncompleteError("the prefix was replaced behind the lookup")
    short = [layer for layer in range(layout.cache_len) if lines.get(f"layer_{layer}_tokens") != str(count)]
    if short:
        raise IncompleteError(f"layers {short} do not hold {count} rows")


class _Receiver:
    """Gives the parser the same buffer for each layer of one side, after placing what was in it before."""

    def __init__(self, restorer: caches.Restorer, side: int) -> None:
        self._place, self._side, self._most = restorer.place, side, restorer.most_bytes
        self._buffer = np.empty(0, np.uint8)
        self._layer: int | None = None
        self._nbytes = 0
        self.wrong: ValueError | None = None

    def __call__(self, layer: int, nbytes: int) -> Any:
        self.flush()
        if not 0 < nbytes <= self._most:
            return None  # arrives as it is; the layer stays missing, which `fetch` notices
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes, np.uint8)
        self._layer, self._nbytes = layer, nbytes
        return self._buffer[:nbytes].data

    def flush(self) -> None:
        """Place the layer whose rows are complete, if there is one."""
        layer, self._layer = self._layer, None
        if layer is not None:
            try:
                self._place(layer, self._side, self._buffer[: self._nbytes].data)
            except ValueError as error:  # the parser, which calls, must go on
                self.wrong = error


def fetch(
    namespace: str, digest: str, infos: list[Any], model: Any, layout: Layout, vquant: str, count: int
) -> Steps[list[Any]]:
    """Fetch all rows of a prefix into a fresh prompt cache.

    Args:
        namespace, digest: the prefix.
        infos: what `lookup` said about it.
        model, layout: what the cache is for.
        vquant: the format asked for.
        count: tokens of the prefix.

    Returns:
        The cache, holding exactly `count` tokens.

    Raises:
        MismatchError: the shape or the format is not this model's.
        IncompleteError: rows are missing, or the prefix was replaced meanwhile. No cache was built.
        CommandError: the server refused.
    """
    raise_first(infos)
    # Words kept as they were serve any request; otherwise the format must be the one asked for.
    allowed = {stored_format(vquant, layout.dtype), _KEPT[layout.dtype]}
    for info in infos:
        _described(info, digest, layout, count, allowed)
    restorer = caches.Restorer(model, layout, count)
    receivers = [_Receiver(restorer, side) for side in range(2)]
    span: list[Any] = ["BATCH", 0, count, layout.cache_len, "FMT", "RAW"]
    asked: list[Command] = [["V.FETCH", sid, *span] for sid in _sids(namespace)]
    # The entry may be replaced at any time: the rows are those of `infos` only if it is the same behind them.
    asked += _infos(namespace)
    replies = yield Flight(asked, dict(enumerate(receivers)))
    raise_first(replies)
    if replies[2:] != infos:
        raise IncompleteError("the prefix was replaced while it was fetched")
    for receiver in receivers:
        receiver.flush()
        if receiver.wrong is not None:
            raise IncompleteError(str(receiver.wrong)) from receiver.wrong
    try:
        return restorer.finish()
    except ValueError as error:
        raise IncompleteError(str(error)) from error


def _lines(info: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)


def _infos(namespace: str) -> list[Command]:
    return [["V.INFO", sid] for sid in _sids(namespace)]


def _sids(namespace: str) -> tuple[bytes, bytes]:
    return namespace.encode() + b"_pk", namespace.encode() + b"_pv"
