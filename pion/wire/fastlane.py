"""The binary lane: frames for attention queries, both directions, without I/O.

Everything is little-endian. A request and its response look alike:

```
request    u16 0xCA5E | u8 command | u32 body length | body
response   u16 0xCA5E | u8 status  | u32 body length | body
```

One response for each request, in order. The body of QUERY_FUSED:

```
u16 length of sid | sid | u16 layer | u16 H_q | u16 D | u16 H_kv | u32 M | u32 S
Q f32[H_q, M, D] | K f32[H_kv, S, D] | V f32[H_kv, S, D] | head_map u8[H_q] | i32 window, or nothing
```

K and V are the suffix of S keys that comes with the query, head_map names the head of K/V of each query head. Window:
only so many positions at the end of the prefix are seen; 0 = all, -1 or nothing = as the server is set. What stands
behind it, and up to three bytes in its place, mean nothing. The body of an OK response is f32[H_q, M, D].
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pion.errors import utf8
from pion.wire.resp import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "HEADER", "MAGIC", "MAX_BODY", "Command", "FusedCall", "Replies", "Reply", "Request", "Requests", "Status",
    "TooLongError", "WireError", "fused_request", "parse_fused", "parse_reply_header", "reply", "request",
]  # fmt: skip

MAGIC: Final = 0xCA5E
HEADER: Final = struct.Struct("<HBI")
MAX_BODY: Final = 0xFFFF_FFFF  # the field for it ends there

_START: Final = MAGIC.to_bytes(2, "little")
_SHORT: Final = struct.Struct("<H")
_FUSED: Final = struct.Struct("<HHHHII")
_WINDOW: Final = struct.Struct("<i")


class Command(IntEnum):
    """What is served here. Servers answer any other command MISS."""

    QUERY_FUSED = 0x24
    AUTH = 0x37
    PING = 0xFF


class Status(IntEnum):
    """What a response says.

    Attributes:
        MISS: an unknown command, or a body that is not what the command takes.
        ERROR: refused or failed; the session is unknown, for one.
        COLDMISS: the session's K/V went for others: KV.PREFIX.WARM brings them back.
    """

    OK = 0
    MISS = 1
    ERROR = 2
    COLDMISS = 3


class WireError(RemoteProtocolError):
    """The peer does not speak this protocol: nothing behind these bytes can be understood."""


class TooLongError(WireError):
    """A body is announced that is longer than this side takes."""


class Request(NamedTuple):
    """One request; `command` may be one that nobody knows."""

    command: int
    body: bytes | bytearray


class Reply(NamedTuple):
    """One response."""

    status: Status
    body: bytes


class FusedCall(NamedTuple):
    """The body of QUERY_FUSED, its sizes checked.

    Attributes:
        sid, layer: whose K/V.
        q_heads, dim, kv_heads, rows, suffix: H_q, D, H_kv, M, S: at least 1, S at least 0, H_q a multiple of H_kv.
        q: fp32 (H_q, M, D), as bytes.
        k_suf, v_suf: fp32 (H_kv, S, D), as bytes.
        head_map: a head of K/V for each query head; the values are not checked.
        window: positions seen at the end of the prefix; 0 = all, -1 = as the server is set.
    """

    sid: bytes
    layer: int
    q_heads: int
    dim: int
    kv_heads: int
    rows: int
    suffix: int
    q: memoryview
    k_suf: memoryview
    v_suf: memoryview
    head_map: memoryview
    window: int


# --- sending ---------------------------------------------------------------------------------------------------------


def request(command: int, body: Buffer = b"") -> list[bytes | memoryview]:
    """A request as buffers for a gathered send; `body` is not copied and must not change until it is sent.

    Raises:
        LocalProtocolError: `body` is not C-contiguous, or longer than 4 GiB.
    """
    return _frame(command, [_flat(body, "the body")])


def reply(status: Status, body: Buffer = b"") -> list[bytes | memoryview]:
    """A response, in the same way."""
    return _frame(status, [_flat(body, "the body")])


def fused_request(
    sid: str | bytes, layer: int, q: Any, k_suf: Any, v_suf: Any, head_map: Any, window: int | None = None
) -> list[bytes | memoryview]:
    """QUERY_FUSED as buffers for a gathered send: header first, arrays as they are.

    Args:
        q: fp32 (H_q, M, D), any C-contiguous array that Python's buffer protocol describes, as numpy's do.
        k_suf, v_suf: fp32 (H_kv, S, D); S may be 0.
        head_map: uint8 (H_q).
        window: see `FusedCall`; None = as the server is set.

    Raises:
        LocalProtocolError: an array of another type, shape or order, or a number that has no room in its field.
    """
    name = utf8(sid, "sid") if isinstance(sid, str) else bytes(sid)
    q_heads, rows, dim = _shape(q, "q")
    kv_heads, suffix, k_dim = _shape(k_suf, "k_suf")
    if _shape(v_suf, "v_suf") != (kv_heads, suffix, dim) or k_dim != dim:
        raise LocalProtocolError(f"k_suf and v_suf must both be (H_kv, S, {dim})")
    heads = _flat(head_map, "head_map")
    if len(heads) != q_heads:
        raise LocalProtocolError(f"head_map must have one byte for each of {q_heads} query heads, not {len(heads)}")
    try:
        head = _SHORT.pack(len(name)) + name + _FUSED.pack(layer, q_heads, dim, kv_heads, rows, suffix)
        tail = b"" if window is None else _WINDOW.pack(window)
    except struct.error as error:
        raise LocalProtocolError(f"a number that the lane has no room for: {error}") from None
    arrays = [_flat(q, "q"), _flat(k_suf, "k_suf"), _flat(v_suf, "v_suf")]
    return _frame(Command.QUERY_FUSED, [head, *arrays, bytes(heads) + tail])


def _frame(kind: int, parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
    nbytes = sum(map(len, parts))
    if nbytes > MAX_BODY:
        raise LocalProtocolError(f"a body of {nbytes} bytes, at most {MAX_BODY} can be announced")
    head = HEADER.pack(MAGIC, kind, nbytes)
    if isinstance(parts[0], bytes):
        return [head + parts[0], *(part for part in parts[1:] if len(part))]
    return [head, *(part for part in parts if len(part))]


def _flat(data: Buffer, name: str) -> bytes | memoryview:
    if isinstance(data, bytes):
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        raise LocalProtocolError(f"{name} must be C-contiguous")
    return view.cast("B") if view.nbytes else b""


def _shape(data: Any, name: str) -> tuple[int, ...]:
    view = memoryview(data)
    if view.format not in ("f", "<f") or view.ndim != 3:
        raise LocalProtocolError(f"{name} must be fp32 of three dimensions, not {view.format!r} of {view.ndim}")
    return view.shape or ()


# --- receiving -------------------------------------------------------------------------------------------------------


class _Frames:
    """Bytes in, frames out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Bytes of frames that are not complete yet, or were not taken yet."""
        return len(self._buffer)

    def feed(self, data: Buffer) -> None:
        """Take over what arrived. Memory follows what was fed, not what was announced."""
        self._buffer += data

    def _take(self) -> tuple[int, bytes | bytearray] | None:
        buffer = self._buffer
        # A single byte tells: somebody who speaks another protocol may wait for an answer to fewer than seven.
        _check_start(bytes(buffer[:2]))
        if len(buffer) < HEADER.size:
            return None
        _, kind, nbytes = HEADER.unpack_from(buffer)
        if nbytes > self.limit:
            raise TooLongError(f"a body of {nbytes} bytes is announced, {self.limit} are taken")
        end = HEADER.size + nbytes
        if len(buffer) < end:
            return None
        if nbytes > len(buffer) - end:  # a large body leaves with the buffer it was received in
            self._buffer = buffer[end:]
            del buffer[end:], buffer[: HEADER.size]
            return kind, buffer
        with memoryview(buffer) as view:
            body = bytes(view[HEADER.size : end])
        del buffer[:end]
        return kind, body


class Requests(_Frames):
    """The server's side.

    Args:
        limit: bytes that a body may have; the attribute may be changed between two requests.
    """

    def next(self) -> Request | None:
        """The next request that is complete, None when more must be fed first.

        Raises:
            WireError: the bytes are not of this protocol.
            TooLongError: the next body would be longer than `limit`.
        """
        frame = self._take()
        return None if frame is None else Request(*frame)


class Replies(_Frames):
    """The client's side.

    Args:
        limit: bytes that a body may have.
    """

    def __init__(self, limit: int = MAX_BODY) -> None:
        super().__init__(limit)

    def next(self) -> Reply | None:
        """The next response that is complete, None when more must be fed first.

        Raises:
            WireError: the bytes are not of this protocol.
            TooLongError: the next body would be longer than `limit`.
        """
        frame = self._take()
        return None if frame is None else Reply(_status(frame[0]), bytes(frame[1]))


def parse_reply_header(header: Buffer) -> tuple[Status, int]:
    """Status and length of the body, from the seven bytes before it: for who receives the body where it belongs.

    Raises:
        WireError: wrong magic, or a status that does not exist.
    """
    magic, status, nbytes = HEADER.unpack(header)
    _check_start(magic.to_bytes(2, "little"))
    return _status(status), nbytes


def _check_start(start: bytes) -> None:
    """Raises WireError for what no frame begins with; the text is the same whether one byte has arrived or more."""
    if not _START.startswith(start):
        wrong = start[:1] if start[0] != _START[0] else start
        raise WireError(f"not the binary lane's protocol: a frame begins with {wrong.hex(' ')}")


def _status(value: int) -> Status:
    try:
        return Status(value)
    except ValueError:
        raise WireError(f"a response with the unknown status {value}") from None


def parse_fused(body: bytes | bytearray) -> FusedCall | None:
    """The fields of a QUERY_FUSED; None when the body is not one (a server answers MISS).

    The arrays are views of `body`.
    """
    view = memoryview(body)
    if len(view) < _SHORT.size:
        return None
    at = _SHORT.size + _SHORT.unpack_from(view)[0]
    if len(view) < at + _FUSED.size:
        return None
    sid = bytes(view[_SHORT.size : at])
    layer, q_heads, dim, kv_heads, rows, suffix = _FUSED.unpack_from(view, at)
    at += _FUSED.size
    if not (q_heads and dim and kv_heads and rows) or q_heads % kv_heads:
        return None
    side = 4 * kv_heads * suffix * dim
    k_at = at + 4 * q_heads * rows * dim
    v_at, map_at = k_at + side, k_at + 2 * side
    end = map_at + q_heads
    if len(view) < end:
        return None
    window = _WINDOW.unpack_from(view, end)[0] if len(view) >= end + _WINDOW.size else -1
    return FusedCall(
        sid, layer, q_heads, dim, kv_heads, rows, suffix,
        view[at:k_at], view[k_at:v_at], view[v_at:map_at], view[map_at:end], window,
    )  # fmt: skip
