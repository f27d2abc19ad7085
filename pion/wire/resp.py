"""RESP2 and RESP3, both directions, without I/O.

Reply values and their encoding:

===============================  ==========================  =======================
value                            RESP3                       RESP2
===============================  ==========================  =======================
bytes, bytearray, memoryview     bulk                        bulk
str                              bulk, UTF-8                 bulk, UTF-8
int                              integer, or big number      integer, or bulk
bool                             boolean                     ``:1`` / ``:0``
float                            double                      bulk
None                             ``_``                       ``$-1``
list, tuple                      array                       array
dict                             map                         flat array
set, frozenset                   set                         array
Simple, ``OK``                   ``+``                       ``+``
Err                              ``-``                       ``-``
Verbatim                         ``=txt:``                   bulk
Push                             ``>``                       array
NULL_ARRAY                       ``_``                       ``*-1``
Raw                              as it is                    as it is
===============================  ==========================  =======================
"""

from collections.abc import Iterable

from pion._core.reply import ReplyError, ReplyParser
from pion._core.request import Parser
from pion._core.resp import (
    NULL_ARRAY,
    OK,
    Encoder,
    Err,
    LocalProtocolError,
    ProtocolError,
    Push,
    Raw,
    RemoteProtocolError,
    Simple,
    Verbatim,
    encode,
    encode_parts,
    register_stream_type,
)
from pion.errors import utf8

__all__ = [
    "NULL_ARRAY",
    "OK",
    "Encoder",
    "Err",
    "LocalProtocolError",
    "Parser",
    "ProtocolError",
    "Push",
    "Raw",
    "RemoteProtocolError",
    "ReplyError",
    "ReplyParser",
    "Simple",
    "Verbatim",
    "encode",
    "encode_command",
    "encode_commands",
    "encode_parts",
    "register_stream_type",
]

Part = bytes | bytearray | memoryview | str | int | float

SEPARATE = 16384
"""An argument of this many bytes is handed to sendmsg as it is instead of being copied."""


def encode_command(*parts: Part) -> list[bytes | memoryview]:
    """Encode one request; see :func:`encode_commands`."""
    return encode_commands([parts])


def encode_commands(commands: Iterable[Iterable[Part]]) -> list[bytes | memoryview]:
    """Encode requests into buffers for a gathered send.

    Args:
        commands: each a sequence of bytes-like objects (C-contiguous, of any item size), str (UTF-8), int or float.

    Returns:
        Buffers to send in order. Small arguments are joined; those of 16 KiB and more are views of the caller's
        memory, which must not change until they are sent.

    Raises:
        LocalProtocolError: an empty command, or an argument of another type.
        ArgumentError: a str without UTF-8; the text says which one.
    """
    out: list[bytes | memoryview] = []
    joined = bytearray()
    for command in commands:
        parts = list(command)
        if not parts:
            raise LocalProtocolError("a command needs at least its name")
        joined += b"*%d\r\n" % len(parts)
        for number, part in enumerate(parts):
            data = utf8(part, _called(parts, number)) if isinstance(part, str) else _argument(part)
            n = data.nbytes if isinstance(data, memoryview) else len(data)
            joined += b"$%d\r\n" % n
            if n >= SEPARATE:
                out.append(bytes(joined))
                out.append(data)
                joined.clear()
            else:
                joined += data
            joined += b"\r\n"
    if joined:
        out.append(bytes(joined))
    return out


def _called(parts: list[Part], number: int) -> str:
    name = parts[0]
    text = name if isinstance(name, str) else repr(name)
    return f"argument {number} of {text}" if number else "the name of the command"


def _argument(part: bytes | bytearray | memoryview | float) -> bytes | memoryview:
    if isinstance(part, bytes):
        return part
    if isinstance(part, bool) or part is None:
        raise LocalProtocolError(f"an argument cannot be {part!r}; say what the command expects, such as 1 or 0")
    if isinstance(part, int):
        return b"%d" % part
    if isinstance(part, float):
        return repr(part).encode()
    try:
        view = memoryview(part)
    except TypeError:
        raise LocalProtocolError(f"an argument cannot be a {type(part).__name__}") from None
    if not view.c_contiguous:
        raise LocalProtocolError("an argument must be C-contiguous")
    return view.cast("B") if view.nbytes else b""
