"""Golden bytes: requests and the replies the specification gives for them.

The expected bytes in the ``kv_*`` modules were typed from the wire specification, section by section; none was copied
from the output of this program. A case is a list of steps on one connection; every step's reply is compared, the
set-up steps too. A reply is either literal bytes or a compiled pattern that must match all of it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

Reply = bytes | re.Pattern[bytes]

OK = b"+OK\r\n"
INT = re.compile(rb":\d+\r\n")
NIL = (b"$-1\r\n", b"_\r\n")  # §0: the null of RESP2 and of RESP3
PONG = b"+PONG\r\n"
PING = b"*1\r\n$4\r\nPING\r\n"
NOT_INT = "ERR value is not an integer or out of range"  # §0

# IEEE little-endian words, typed by hand: fp32, fp16, bf16
F32 = {
    0.0: b"\x00\x00\x00\x00",
    0.5: b"\x00\x00\x00\x3f",
    1.0: b"\x00\x00\x80\x3f",
    2.0: b"\x00\x00\x00\x40",
    -1.5: b"\x00\x00\xc0\xbf",
    1.5: b"\x00\x00\xc0\x3f",
    3.0: b"\x00\x00\x40\x40",
}
F16 = {0.0: b"\x00\x00", 0.5: b"\x00\x38", 1.0: b"\x00\x3c", 2.0: b"\x00\x40", -1.5: b"\x00\xbe", 3.0: b"\x00\x42"}
BF16 = {0.5: b"\x00\x3f", 1.0: b"\x80\x3f", 2.0: b"\x00\x40", -1.5: b"\xc0\xbf"}


def f32(*values: float) -> bytes:
    return b"".join(F32[v] for v in values)


def f16(*values: float) -> bytes:
    return b"".join(F16[v] for v in values)


def bf16(*values: float) -> bytes:
    return b"".join(BF16[v] for v in values)


@dataclass(frozen=True)
class Step:
    request: bytes
    resp2: Reply
    resp3: Reply


@dataclass(frozen=True)
class Golden:
    """One case.

    Attributes:
        name: what it shows; unique in its module.
        section: the section of the wire specification it was typed from (``design`` where the design goes further).
        steps: requests and replies, in order, on one connection.
        flags: server options it needs beside ``--kvcache``; ``("-kvcache",)`` means a server without that flag.
        fresh: True when the replies depend on nothing having happened on the server before.
    """

    name: str
    section: str
    steps: tuple[Step, ...]
    flags: tuple[str, ...] = ()
    fresh: bool = False


def cmd(line: str, *blobs: bytes) -> bytes:
    """A multibulk request: the words of ``line``, in which ``%`` stands for the next of ``blobs``."""
    rest = iter(blobs)
    parts = [next(rest) if word == "%" else word.encode() for word in line.split()]
    assert next(rest, None) is None
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


def bulk(body: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(body), body)


def err(text: str) -> bytes:
    return b"-" + text.encode() + b"\r\n"


def lines(*names: str) -> bytes:
    """A bulk of CRLF-terminated lines (§1.5, §4.6)."""
    return bulk("".join(f"{name}\r\n" for name in names).encode())


def praw(dim: int, start: int, rows: int, *runs: tuple[int, int, int, int, int, int], theta: float = 0.0) -> bytes:
    """The header of an answer to FMT RAW; a run is code, flags, parameter, first row, rows, stored bytes."""
    length = (32 + 24 * len(runs) + 63) // 64 * 64
    head = struct.pack("<4sHHIIIId", b"PRAW", 1, length, dim, start, rows, len(runs), theta)
    head += b"".join(struct.pack("<BBHIIIQ", *run[:5], 0, run[5]) for run in runs)
    return head + bytes(length - len(head))


def u64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def case(
    name: str,
    section: str,
    *steps: tuple[bytes, Reply | tuple[Reply, Reply]],
    flags: tuple[str, ...] = (),
    fresh: bool = False,
) -> Golden:
    made = []
    for request, reply in steps:
        two, three = reply if isinstance(reply, tuple) else (reply, reply)
        made.append(Step(request, two, three))
    return Golden(name, section, tuple(made), flags, fresh)


def errors(name: str, section: str, *pairs: tuple[bytes, str], setup: tuple[bytes, ...] = (), **kw: object) -> Golden:
    """A case of refusals: each request with its error text; ``setup`` requests are answered +OK or an integer."""
    ready = re.compile(rb"(\+OK|:\d+)\r\n")
    return case(name, section, *[(r, ready) for r in setup], *[(r, err(t)) for r, t in pairs], **kw)  # type: ignore[arg-type]


def matches(reply: Reply, got: bytes) -> bool:
    return got == reply if isinstance(reply, bytes) else reply.fullmatch(got) is not None
