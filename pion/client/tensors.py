"""Prefixes as numpy arrays: what to send and how to read the answers, without I/O.

A prefix is K and V of all layers, each ``(layers, heads, tokens, head_dim)``. On the wire and in the store a row is one
token: ``heads * head_dim`` values. An array fetched is therefore a view whose memory is
``(layers, tokens, heads, head_dim)``; storing such a view again copies nothing.

numpy has no bfloat16: its words travel as ``uint16`` arrays with ``dtype="bfloat16"`` beside them (for torch:
``tensor.view(torch.uint16).numpy()`` and ``torch.from_numpy(array).view(torch.bfloat16)``). Arrays of the
``ml_dtypes`` package's bfloat16 are understood when stored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pion._core.buffers import BufferPool
from pion.client import calls
from pion.client.connection import Command, Flight, Steps, expect_ok
from pion.client.decode import CODES, NUMPY, Decoder
from pion.client.errors import IncompleteError, PrefixMissError, reply_error
from pion.client.formats import Sides, check_name, described, registration, stored_format
from pion.client.receive import Receiver
from pion.errors import CommandError, MismatchError, utf8
from pion.wire.raw import Stored
from pion.wire.resp import Part, ReplyError

__all__ = ["KV", "Array", "fetch", "lookup", "store"]

Array = NDArray[Any]
Layers = Array | Sequence[Array]

_WIRE: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_FETCHED: Final = {"fp16": "float16", "bf16": "bfloat16"}  # when it is the only one; all else is decoded to float32


class KV(NamedTuple):
    """A fetched prefix.

    Attributes:
        k, v: ``(layers, heads, tokens, head_dim)``; the arrays (or lists of layers) given as ``out`` when there were.
        dtype: ``"float16"``, ``"float32"`` or ``"bfloat16"`` (then the arrays are uint16 words).
    """

    k: Any
    v: Any
    dtype: str


def dtype_of(array: Array, dtype: str | None) -> str:
    """The dtype an array is stored as.

    Raises:
        TypeError: another dtype, or uint16 without saying that it holds bfloat16.
    """
    name = array.dtype.name
    if name == "uint16" and dtype == "bfloat16":
        return dtype
    if name == "uint16" and dtype is None:
        raise TypeError('uint16 arrays can hold anything: pass dtype="bfloat16" if these are bfloat16 words')
    if name not in NUMPY or array.dtype.byteorder == ">" or (dtype is not None and dtype != name):
        raise TypeError(f"cannot use {array.dtype} as {dtype or 'K/V'} (want float16, float32, or bfloat16 as uint16)")
    return name


def layers_of(tensor: Layers, what: str) -> list[Array]:
    """The layers of a tensor, each ``(heads, tokens, head_dim)``.

    Raises:
        ValueError: another rank, no layer, no token, or layers that differ in shape.
        TypeError: not numpy arrays.
    """
    if not hasattr(tensor, "__iter__"):
        raise TypeError(f"{what} must be numpy arrays, not {type(tensor).__name__}")
    layers = list(tensor)
    if not layers:
        raise ValueError(f"{what} has no layers")
    for layer in layers:
        if not isinstance(layer, np.ndarray):
            raise TypeError(f"{what} must be numpy arrays, not {type(layer).__name__}")
        if layer.ndim != 3 or 0 in layer.shape:
            raise ValueError(f"{what} must be (layers, heads, tokens, head_dim); a layer has shape {layer.shape}")
        if layer.shape != layers[0].shape or layer.dtype != layers[0].dtype:
            raise ValueError(f"the layers of {what} differ: {layer.shape} {layer.dtype}, {layers[0].shape}")
    return layers


def rows_of(layer: Array) -> Array:
    """One layer as rows, contiguous: ``(tokens, heads * head_dim)``. Copies unless it is stored by token."""
    heads, tokens, head_dim = layer.shape
    rows = np.ascontiguousarray(layer.transpose(1, 0, 2)).reshape(tokens, heads * head_dim)
    return rows.view(np.uint16) if layer.dtype.name == "bfloat16" else rows


def store(
    ns: str | bytes,
    k: Layers,
    v: Layers,
    *,
    vquant: str = "native",
    k_format: str | None = None,
    v_format: str | None = None,
    dtype: str | None = None,
    digest: str | None = None,
    prefill_ms: int = 0,
    scope: str | bytes | None = None,
    parent: str | bytes | None = None,
    rope: float | None = None,
    blocks: tuple[int, Any] | None = None,
    replace: bool = False,
) -> Steps[None]:
    """Register a prefix and store all its rows; see ``Client.store``."""
    sids = _sids(ns)
    for what, text in (("digest", digest), ("scope", scope), ("parent", parent)):
        if isinstance(text, str):
            utf8(text, what)
    sides = layers_of(k, "k"), layers_of(v, "v")
    if sides[0][0].shape != sides[1][0].shape or len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"k and v differ: {len(sides[0])} x {sides[0][0].shape}, {len(sides[1])} x {sides[1][0].shape}"
        )
    name = dtype_of(sides[0][0], dtype)
    if dtype_of(sides[1][0], dtype) != name:
        raise TypeError(f"k is {name} and v is {sides[1][0].dtype}")
    heads, tokens, head_dim = sides[0][0].shape
    for what, asked in (("vquant", vquant), ("k_format", k_format), ("v_format", v_format)):
        if asked is not None:
            check_name(what, asked)
    # Format fp16 keeps the words of both 16-bit dtypes, and the entry remembers which they are.
    k_stored, v_stored = (stored_format(asked or vquant, name) for asked in (k_format, v_format))
    layers = len(sides[0])
    command: list[Part] = registration(ns, heads * head_dim, ((k_stored,) * layers, (v_stored,) * layers))
    if blocks is not None:
        hashes = np.ascontiguousarray(blocks[1], dtype="<u8")
        command += ["BLOCKS", blocks[0], hashes.size, hashes.tobytes()]
    command += ["ROWS", tokens, "LAYERS", layers, "HEADS", heads, "HEAD_DIM", head_dim]
    options: dict[str, Part | None] = {"PREFILL_MS": prefill_ms or None, "DIGEST": digest, "SCOPE": scope}
    options |= {"PARENT": parent, "ROPE": rope}
    for word, value in options.items():
        if value is not None:
            command += [word, value]
    if replace:
        command.append("REPLACE")
    # On its own: rows sent behind a refused REGISTER would land in the entry that is there.
    opening: list[Command] = [command] if digest is not None else [command, ["V.INFO", sids[0]]]
    reply, *info = yield Flight(opening)
    expect_ok(reply, str(command[0]))
    if info and isinstance(info[0], bytes) and b"\r\ndigest:" in info[0]:
        held = info[0].partition(b"\r\ndigest:")[2].partition(b"\r\n")[0].decode()
        raise MismatchError(f"MISMATCH prefix {_text(ns)!r} is stored with the digest {held}, none was given")

    belongs: list[Part] = [] if digest is None else ["DIGEST", digest]  # and not to who replaced it meanwhile

    def rows() -> Iterator[Command]:
        for index in range(len(sides[0])):
            for sid, side in zip(sids, sides, strict=True):
                data = rows_of(side[index]).data
                yield "V.STOREBATCH", sid, index, 0, tokens, data, "FMT", _WIRE[name], *belongs

    replies = yield Flight(rows())
    try:
        for number, reply in enumerate(replies):
            if isinstance(reply, ReplyError):
                raise reply_error(f"{reply} (layer {number // 2} of {'KV'[number % 2]}, prefix {_text(ns)!r})")
            expect_ok(reply, "V.STOREBATCH")
    except CommandError:
        if digest is not None:
            yield from calls.abandon(ns, digest)
        else:
            yield from _drop_incomplete(ns, layers, tokens)
        raise


def _drop_incomplete(ns: str | bytes, layers: int, tokens: int) -> Steps[None]:
    """After a refusal: leave nothing behind that nobody can use. An entry that is whole is another's work."""
    infos = yield Flight([["V.INFO", sid] for sid in _sids(ns)])
    wanted = {f"layer_{layer}_tokens:{tokens}" for layer in range(layers)}
    if not all(isinstance(info, bytes) and wanted <= set(info.decode().split("\r\n")) for info in infos):
        yield Flight([["KV.PREFIX.DROP", ns]])


def lookup(ns: str | bytes, digest: str | None, tokens: int | None, prefill_ms: int | None) -> list[Part]:
    """The LOOKUP command."""
    name = utf8(ns, "the namespace") if isinstance(ns, str) else ns
    command: list[Part] = ["KV.PREFIX.LOOKUP", name]
    if digest is not None:
        command += ["DIGEST", utf8(digest, "digest")]
    for word, value in (("TOKENS", tokens), ("PREFILL_MS", prefill_ms)):
        if value is not None:
            command += [word, value]
    return command


class Shape(NamedTuple):
    """What V.INFO tells about one side of a prefix."""

    layers: int
    heads: int
    tokens: int
    head_dim: int


def dtype_for(formats: Sides) -> str:
    """The dtype the rows are answered in."""
    names = {*formats[0], *formats[1]}
    return _FETCHED.get(names.pop(), "float32") if len(names) == 1 else "float32"


def fetch(
    ns: str | bytes,
    pool: BufferPool,
    *,
    out: tuple[Layers, Layers] | None = None,
    dtype: str | None = None,
    digest: str | None = None,
    tokens: int | None = None,
    prefill_ms: int | None = None,
    heads: int | None = None,
) -> Steps[KV]:
    """Fetch a whole prefix; see ``Client.fetch``."""
    sids = _sids(ns)
    infos: list[list[Part]] = [["V.INFO", sid] for sid in sids]
    ask = [lookup(ns, digest, tokens, prefill_ms), *infos]
    if out is None:
        found = yield Flight(ask)
        yield from _check_hit(ns, found[0])
        before = found[1:]
        shape, formats = _shape(ns, before, heads)
        name = dtype_for(formats)
        target = _Target(shape, name, None, pool, native=name == "float16" or {*formats[0], *formats[1]} == {"fp32"})
        replies = yield Flight([*target.commands(sids), *infos], target.outs(0))
    else:
        given = layers_of(out[0], "out[0]"), layers_of(out[1], "out[1]")
        want, name = given[0][0].shape, dtype_of(given[0][0], dtype)
        if given[1][0].shape != want or len(given[1]) != len(given[0]) or dtype_of(given[1][0], dtype) != name:
            raise ValueError("the two arrays of out differ in shape or dtype")
        if not all(layer.flags.writeable for side in given for layer in side):
            raise ValueError("out cannot be written to")
        target = _Target(Shape(len(given[0]), *want), name, given, pool, native=name == "float16")
        replies = yield Flight([*ask, *target.commands(sids), *infos], target.outs(3))
        yield from _check_hit(ns, replies[0])
        before, replies = replies[1:3], replies[3:]
        shape, formats = _shape(ns, before, want[0])
        if (shape, dtype_for(formats)) != (target.shape, name):
            raise MismatchError(
                f"MISMATCH prefix {_text(ns)!r} is {tuple(shape)} {dtype_for(formats)}, "
                f"out is {tuple(target.shape)} {name}"
            )
    _raise_named(ns, replies[:2])
    # The entry may be replaced between the flights, or between the commands of one: ask again behind the rows.
    if replies[2:] != before:
        raise IncompleteError(f"prefix {_text(ns)!r} changed while it was fetched")
    target.check(ns, replies[:2], formats)
    if out is None:
        return target.fresh()
    target.copy_out()
    return KV(out[0], out[1], target.dtype)


class _Target:
    """Memory for one fetch: each layer's rows are received where they belong, decoded there, or brought into scratch
    when `out` has another order in memory."""

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        out: tuple[list[Array], list[Array]] | None,
        pool: BufferPool,
        *,
        native: bool,
    ) -> None:
        self.shape, self.dtype, self.out, self._native = shape, dtype, out, native
        kind = np.dtype(NUMPY[dtype])
        rows = (shape.layers, shape.tokens, shape.heads, shape.head_dim)
        size = kind.itemsize * shape.layers * shape.tokens * shape.heads * shape.head_dim
        self.sides: list[list[Array]] = []
        self.whole: list[Array] = []
        for side in range(2):
            if out is not None and all(layer.transpose(1, 0, 2).flags.c_contiguous for layer in out[side]):
                self.sides.append([layer.transpose(1, 0, 2) for layer in out[side]])
                continue
            array = np.frombuffer(memoryview(pool.take(size)), kind).reshape(rows)
            self.whole.append(array)
            self.sides.append(list(array))
        dim = shape.heads * shape.head_dim
        self._decoder = Decoder(dim, dtype)
        self._receivers = [
            Receiver(
                "KV"[side],
                shape.layers,
                shape.tokens,
                dim,
                functools.partial(self._place, side),
                (CODES[dtype], functools.partial(self._home, side)),
            )
            for side in range(2)
        ]

    def _home(self, side: int, layer: int) -> memoryview:
        return self.sides[side][layer].reshape(-1).view(np.uint8).data

    def _place(self, side: int, layer: int, stored: Stored, answer: memoryview) -> None:
        if any(segment.missing for segment in stored.segments):
            raise ValueError("rows are missing")
        rows = self.sides[side][layer].reshape(self.shape.tokens, -1)
        for first, piece in self._decoder.pieces(stored, answer):
            rows[first : first + len(piece)] = piece

    def commands(self, sids: tuple[bytes, bytes]) -> list[list[Part]]:
        """One V.FETCH per side: NATIVE where only the words wanted can be meant, which needs no header in front of
        every layer; else RAW, so that the rows cross the wire as they are stored."""
        n, layers, words = self.shape.tokens, self.shape.layers, "NATIVE" if self._native else "RAW"
        return [["V.FETCH", sid, "BATCH", 0, n, layers, "FMT", words] for sid in sids]

    def outs(self, first: int) -> dict[int, Any]:
        """Where both replies go; the first V.FETCH is command number `first`."""
        plans: list[Any] = list(self._receivers)
        if self._native:
            plans = [[layer.data for layer in layers] for layers in self.sides]
        return {first + side: plan for side, plan in enumerate(plans)}

    def check(self, ns: str | bytes, replies: list[Any], formats: Sides) -> None:
        """Every row must have arrived in its place, in the format it should have.

        Raises:
            IncompleteError: a layer is missing, has another size or is in another format.
        """
        for side, reply in enumerate(replies):
            wrong = ""
            if not isinstance(reply, list) or len(reply) != self.shape.layers:
                wrong = f"not {self.shape.layers} layers in {'KV'[side]}"
            elif not self._native:
                wrong = self._receivers[side].finish(formats[side])
            else:
                for index, item in reversed(list(enumerate(reply))):
                    if not isinstance(item, memoryview):
                        got = "nothing" if item is None else f"{len(item)} bytes"
                        wrong = f"layer {index} of {'KV'[side]} is {got}, not {self.sides[side][index].nbytes} bytes"
            if wrong:
                raise IncompleteError(f"prefix {_text(ns)!r}: {wrong}")

    def fresh(self) -> KV:
        """The arrays received into memory of the pool."""
        k, v = (array.transpose(0, 2, 1, 3) for array in self.whole)
        return KV(k, v, self.dtype)

    def copy_out(self) -> None:
        """Bring what was received into scratch into the caller's arrays."""
        for layers, received in zip(self.out or (), self.sides, strict=True):
            for layer, rows in zip(layers, received, strict=True):
                if not np.shares_memory(layer, rows):
                    layer[...] = rows.transpose(1, 0, 2)


def _raise_named(ns: str | bytes, replies: Sequence[Any]) -> None:
    """Raise the first error reply, saying of which prefix."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            named = _text(ns) in str(reply)
            raise reply_error(str(reply) if named else f"{reply} (prefix {_text(ns)!r})")


def _check_hit(ns: str | bytes, reply: Any) -> Steps[None]:
    _raise_named(ns, [reply])
    if reply != "HIT":
        (why,) = yield Flight([["KV.PREFIX.WHY", ns]])
        text = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        raise PrefixMissError(f"prefix {_text(ns)!r}: {text}")


def _shape(ns: str | bytes, infos: Sequence[Any], heads: int | None) -> tuple[Shape, Sides]:
    """The shape both sides have, and the formats of their layers.

    Raises:
        IncompleteError: the sides differ, or a layer is shorter than the others.
    """
    _raise_named(ns, infos)
    sides, formats = [], []
    for info in infos:
        lines = dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)
        held = described(lines)
        layers, dims = len(held), {dim for dim, _ in held} or {int(lines["value_dim"])}
        rows = {int(lines.get(f"layer_{i}_tokens", 0)) for i in range(layers)}
        if len(rows) != 1 or 0 in rows:
            raise IncompleteError(f"prefix {_text(ns)!r}: its layers hold {sorted(rows)} rows")
        if len(dims) != 1:
            raise ValueError(
                f"prefix {_text(ns)!r}: its layers have rows of {sorted(dims)} values; fetch them by layer"
            )
        dim, count = dims.pop(), heads or int(lines.get("heads", 0))
        if not count or dim % count:
            raise ValueError(f"prefix {_text(ns)!r} was stored without HEADS: say heads=… (a row has {dim} values)")
        sides.append(Shape(layers, count, rows.pop(), dim // count))
        formats.append(tuple(fmt for _, fmt in held))
    if sides[0] != sides[1]:
        raise IncompleteError(f"prefix {_text(ns)!r}: K is {tuple(sides[0])}, V is {tuple(sides[1])}")
    return sides[0], (formats[0], formats[1])


def _sids(ns: str | bytes) -> tuple[bytes, bytes]:
    if not isinstance(ns, str | bytes):
        raise TypeError(f"a namespace is str or bytes, not {type(ns).__name__}")
    name = utf8(ns, "the namespace") if isinstance(ns, str) else ns
    return name + b"_pk", name + b"_pv"


def _text(ns: str | bytes) -> str:
    return ns if isinstance(ns, str) else ns.decode("utf-8", "backslashreplace")
