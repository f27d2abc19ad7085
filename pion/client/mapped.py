"""A prefix in the server's own file, mapped: the fastest way from a server on the same machine (KV.PREFIX.LANE).

The command says where everything lies and gives a ticket; the server's Unix socket takes the ticket and answers with a
descriptor that can only read. What is mapped stays as it is while it is mapped, whatever becomes of the prefix.
"""

from __future__ import annotations

import errno
import ipaddress
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np

from pion.client.address import Address
from pion.client.connection import Flight, Steps
from pion.client.decode import CODES, NUMPY, Decoder
from pion.client.errors import IncompleteError, LaneError, PrefixMissError, reply_error
from pion.wire import raw
from pion.wire.resp import ReplyError

__all__ = ["MappedKV", "MappedLayer", "NoDescriptorError", "is_local", "lane_command", "map_prefix", "mapped"]

_U64: Final = struct.Struct("<QQ")
_PATIENCE: Final = 5.0  # seconds for the lane's socket
_PLAIN: Final = {CODES[name]: NUMPY[name] for name in CODES}
_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class NoDescriptorError(LaneError):
    """This process, and not the server, cannot take the file."""


def is_local(address: Address) -> bool:
    """Whether the server is on this machine for certain."""
    if address.path:
        return True
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host.strip("[]")).is_loopback
    except ValueError:
        return False


class MappedLayer(NamedTuple):
    """Rows of one layer of one side.

    Attributes:
        stored: what they are; segments are counted from the beginning of the bytes.
        pieces: their bytes, read-only, in order.
    """

    stored: raw.Stored
    pieces: list[memoryview]

    def rows(self) -> np.ndarray[Any, Any]:
        """The rows, (rows, values): a read-only view when they are whole words in one piece, else decoded to float32
        (or, in several pieces of words, copied)."""
        stored = self.stored
        formats = {segment.fmt for segment in stored.segments}
        kind = _PLAIN.get(next(iter(formats))) if len(formats) == 1 else None
        if kind is not None:
            parts = [np.frombuffer(piece, kind) for piece in self.pieces]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            whole.flags.writeable = False
            return whole.reshape(stored.rows, stored.dim)
        body = self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))
        out = np.empty((stored.rows, stored.dim), np.float32)
        for first, rows in Decoder(stored.dim, "float32").pieces(stored, body):
            out[first : first + len(rows)] = rows
        out.flags.writeable = False
        return out


class MappedKV:
    """A prefix whose bytes lie in a mapped file; nothing is read before it is used, and nothing can be written.

    Attributes:
        tokens, layers, heads, head_dim: the shape.
        digest: what the rows belong to, or None.
        generation: of the server's file.
        nbytes: stored bytes of K and V.
        states: recurrent state by number, as bytes.

    The views keep the mapping: it ends when the last of them is gone.
    """

    def __init__(
        self, told: _Told, sides: tuple[list[MappedLayer], list[MappedLayer]], states: dict[int, memoryview],
        heads: int | None,
    ) -> None:  # fmt: skip
        self.sides, self.states = sides, states
        self.tokens, self.layers = told.rows, len(sides[0])
        self.digest, self.generation = told.digest, told.generation
        self.nbytes = sum(len(piece) for side in sides for layer in side for piece in layer.pieces)
        dims = {layer.stored.dim for side in sides for layer in side}
        self.heads = heads or told.heads
        self.head_dim = dims.pop() // self.heads if self.heads and len(dims) == 1 else None

    def k(self, layer: int) -> np.ndarray[Any, Any]:
        """K of a layer, read-only, (heads, tokens, head_dim): 16-bit and 32-bit words as they lie in the file (bfloat16
        as uint16), others decoded to float32 with each call."""
        return self._array(0, layer)

    def v(self, layer: int) -> np.ndarray[Any, Any]:
        """V of a layer, likewise."""
        return self._array(1, layer)

    def rows(self, side: int, layer: int) -> np.ndarray[Any, Any]:
        """The same as rows, (tokens, values); `side` 0 = K, 1 = V."""
        return self._layer(side, layer).rows()

    def _layer(self, side: int, layer: int) -> MappedLayer:
        if not self.sides[side]:
            raise ValueError("this mapping was closed" if self.layers else "this prefix has no layers of rows")
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer}: the prefix has {self.layers}")
        return self.sides[side][layer]

    def _array(self, side: int, layer: int) -> np.ndarray[Any, Any]:
        if not self.heads:
            raise ValueError("the prefix was stored without HEADS: say heads=…")
        rows = self.rows(side, layer)
        return rows.reshape(len(rows), self.heads, -1).transpose(1, 0, 2)

    def close(self) -> None:
        """Let go of the file; views that were given out keep it."""
        self.sides, self.states = ([], []), {}

    def __enter__(self) -> MappedKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MappedKV {self.layers} layers of {self.tokens} tokens, {self.nbytes} bytes>"


class _Told(NamedTuple):
    socket: str
    ticket: bytes
    generation: str
    digest: str | None
    rows: int
    heads: int | None
    sides: tuple[list[tuple[raw.Stored, list[tuple[int, int]]]], list[tuple[raw.Stored, list[tuple[int, int]]]]]
    states: list[tuple[int, int, int]]


def lane_command(ns: str | bytes) -> list[str | bytes]:
    """The question where a prefix lies."""
    return ["KV.PREFIX.LANE", ns]


def map_prefix(ns: str | bytes, address: Address, *, heads: int | None = None, offer: Any = None) -> Steps[MappedKV]:
    """Map a complete prefix.

    Args:
        heads: of a row, where the prefix does not say.
        offer: the reply to `lane_command`, when it is there already.

    Raises:
        LaneError: the server is on another machine, or does not hand out files (to us).
        PrefixMissError: there is no such prefix, or it is not complete.
        CommandError: the server refused.
        IncompleteError: it went away meanwhile.
    """
    if not is_local(address):
        raise LaneError(f"{address} is not on this machine: its files cannot be mapped")
    reply = offer
    if reply is None:
        (reply,) = yield Flight([lane_command(ns)])
    if isinstance(reply, ReplyError) and _is_refusal(str(reply)):
        raise LaneError(str(reply))
    if isinstance(reply, ReplyError) and ("not found" in str(reply) or "that are complete" in str(reply)):
        (why,) = yield Flight([["KV.PREFIX.WHY", ns]])
        text = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(reply)
        raise PrefixMissError(f"prefix {_text(ns)!r}: {str(reply) if text.startswith('hit') else text}")
    if isinstance(reply, ReplyError):
        raise reply_error(f"{reply} (prefix {_text(ns)!r})")
    told = _parse(reply)
    fd = _redeem(told)
    try:
        return _map(fd, told, heads)
    finally:
        os.close(fd)


def _text(ns: str | bytes) -> str:
    return ns if isinstance(ns, str) else ns.decode("utf-8", "backslashreplace")


def _is_refusal(text: str) -> bool:
    """Whether the server hands out no files at all, rather than not this one."""
    lower = text.lower()
    return "unknown command" in lower or "--lane off" in text or "on the server's machine" in text


def _parse(reply: Any) -> _Told:
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    fields = {bytes(name).decode(): value for name, value in pairs}
    try:
        sides = tuple(_layers(fields[name]) for name in ("keys", "values"))
        states = fields["states"]
        return _Told(
            os.fsdecode(bytes(fields["socket"])), bytes(fields["ticket"]), bytes(fields["generation"]).decode(),
            None if fields["digest"] is None else bytes(fields["digest"]).decode(), int(fields["rows"]),
            None if fields["heads"] is None else int(fields["heads"]), (sides[0], sides[1]),
            list(zip(states[::3], states[1::3], states[2::3], strict=True)),
        )  # fmt: skip
    except (KeyError, TypeError, struct.error) as error:
        raise LaneError(f"an answer to KV.PREFIX.LANE that this version does not know: {error!r}") from error


def _layers(flat: Sequence[bytes]) -> list[tuple[raw.Stored, list[tuple[int, int]]]]:
    out = []
    known: dict[tuple[bytes, int], raw.Stored] = {}  # most layers of a prefix are alike
    for head, packed in zip(flat[::2], flat[1::2], strict=True):
        pieces = list(_U64.iter_unpack(packed))
        key = bytes(head), sum(nbytes for _, nbytes in pieces)
        stored = known.get(key)
        if stored is None:
            stored = raw.parse(*key)
            # counted from the beginning of the bytes, which have no header in front of them here
            segments = [segment._replace(offset=segment.offset - len(head)) for segment in stored.segments]
            stored = known[key] = stored._replace(segments=segments)
        out.append((stored, pieces))
    return out


def _redeem(told: _Told) -> int:
    """The descriptor that the ticket is for."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_PATIENCE)
            sock.connect(told.socket)
            sock.sendall(told.ticket + b"\n")
            answer, fds, flags, _ = socket.recv_fds(sock, 200, 1, _CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise NoDescriptorError(
                "this process has no free file descriptor for the lane's socket (ulimit -n)"
            ) from None
        raise LaneError(f"the server's socket {told.socket} cannot be used: {error.strerror or error}") from error
    if not fds and flags & socket.MSG_CTRUNC:
        raise NoDescriptorError("this process has no free file descriptor for the server's file (ulimit -n)")
    if not fds:
        raise IncompleteError(f"the server did not hand out its file: {answer[1:].decode('utf-8', 'replace').strip()}")
    if not _CLOEXEC:
        os.set_inheritable(fds[0], False)
    return fds[0]


def _map(fd: int, told: _Told, heads: int | None) -> MappedKV:
    ends = [offset + nbytes for side in told.sides for _, pieces in side for offset, nbytes in pieces]
    ends += [offset + nbytes for _, offset, nbytes in told.states]
    size = max(ends, default=0)
    if os.fstat(fd).st_size < size:  # reading beyond its end would be the end of this process
        raise IncompleteError("the server's file is shorter than it said")
    try:
        whole = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) if size else b"")
    except OSError as error:  # Python keeps a descriptor of its own for a mapping
        what = " (no free file descriptor: ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise NoDescriptorError(f"the server's file cannot be mapped: {error.strerror}{what}") from error
    sides = tuple(
        [MappedLayer(stored, [whole[offset : offset + nbytes] for offset, nbytes in pieces]) for stored, pieces in side]
        for side in told.sides
    )
    states = {number: whole[offset : offset + nbytes] for number, offset, nbytes in told.states}
    return MappedKV(told, (sides[0], sides[1]), states, heads)


def mapped(ns: str | bytes, address: Address, digest: str, count: int, offer: Any = None) -> Steps[MappedKV]:
    """`map_prefix` of these tokens: with this digest and so many rows.

    Raises:
        IncompleteError: it is another one's by now.
    """
    found = yield from map_prefix(ns, address, offer=offer)
    if found.digest != digest or found.tokens != count:
        raise IncompleteError("the prefix was replaced behind the lookup")
    return found
