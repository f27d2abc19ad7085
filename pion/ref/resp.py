"""RESP in plain Python: readable twin of ``pion._core.resp`` and ``pion._core.reply``, and the oracle of their tests.

Nothing here is incremental. Each function looks at all the bytes there are and says what they mean, following the
specification (https://redis.io/docs/latest/develop/reference/protocol-spec/) and, for requests, the rules of the
Redis server's ``networking.c``.
"""

import math
import re
from typing import Any

from pion._core.reply import ReplyError
from pion._core.resp import NULL_ARRAY, Err, Push, Raw, Simple, Verbatim

MAX_ARGS, MAX_BULK, MAX_INLINE = 1024 * 1024, 512 << 20, 64 << 10
INTEGER = re.compile(rb"0|-?[1-9][0-9]*")


class Incomplete(Exception):
    """The bytes end inside a frame."""


class Malformed(Exception):
    """The bytes are not RESP."""


def integer(text: bytes) -> int | None:
    """A 64-bit integer as Redis reads one: no plus, no leading zero, no space."""
    if len(text) <= 20 and INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    return None


# ---- requests ----


def parse_requests(data: bytes) -> tuple[list[list[bytes]], int, str | None]:
    """All commands in `data`.

    Returns:
        The commands (those without arguments left out), the number of bytes they took, and the text of the error
        that ends the connection, or None.
    """
    commands: list[list[bytes]] = []
    at = 0
    while at < len(data):
        try:
            argv, at = parse_request(data, at)
        except Incomplete:
            break
        except Malformed as error:
            return commands, at, f"Protocol error: {error}"
        if argv:
            commands.append(argv)
    return commands, at, None


def parse_request(data: bytes, at: int) -> tuple[list[bytes], int]:
    """The frame that starts at `at` (which is inside `data`), and where it ends."""
    if data[at : at + 1] != b"*":
        return parse_inline(data, at)
    line, at = header(data, at + 1, "too big mbulk count string", "invalid multibulk length")
    count = integer(line)
    if count is None or count > MAX_ARGS:
        raise Malformed("invalid multibulk length")
    argv = []
    for _ in range(count):
        if at == len(data):
            raise Incomplete
        if data[at : at + 1] != b"$":
            got = data[at : at + 1].replace(b"\r", b" ").replace(b"\n", b" ").decode("latin-1")
            raise Malformed(f"expected '$', got '{got}'")
        line, at = header(data, at + 1, "too big bulk count string", "invalid bulk length")
        size = integer(line)
        if size is None or not 0 <= size <= MAX_BULK:
            raise Malformed("invalid bulk length")
        argv.append(data[at : at + size])
        end = data[at + size : at + size + 2]
        if not b"\r\n".startswith(end):
            raise Malformed("invalid bulk length")
        if len(end) < 2:
            raise Incomplete
        at += size + 2
    return argv, at


def header(data: bytes, at: int, too_long: str, invalid: str) -> tuple[bytes, int]:
    """The line that starts at `at` without its CRLF, and where the next one starts."""
    stop = re.compile(rb"[\r\n]").search(data, at)
    end = stop.start() if stop else len(data)
    if end - at > MAX_INLINE:
        raise Malformed(too_long)
    if not b"\r\n".startswith(data[end : end + 2]):
        raise Malformed(invalid)
    if data[end : end + 2] != b"\r\n":
        raise Incomplete
    return data[at:end], end + 2


def parse_inline(data: bytes, at: int) -> tuple[list[bytes], int]:
    """A line of words, which may be quoted as in a shell."""
    newline = data.find(b"\n", at)
    end = newline if newline >= 0 else len(data)
    if end - at > MAX_INLINE:
        raise Malformed("too big inline request")
    if newline < 0:
        raise Incomplete
    return split_inline(data[at:end].removesuffix(b"\r")), end + 1


SPACE = b" \t\n\v\f\r"
ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "b": b"\b", "a": b"\a"}
DOUBLE = re.compile(rb'"((?:\\x[0-9a-fA-F]{2}|\\.|[^"\\])*)"(?=[ \t\n\v\f\r]|$)', re.S)
SINGLE = re.compile(rb"'((?:\\'|[^'])*)'(?=[ \t\n\v\f\r]|$)", re.S)


def split_inline(line: bytes) -> list[bytes]:
    """Words of an inline command. An argument is plain text, then optionally one quoted part that ends it."""
    argv = []
    rest = line.lstrip(SPACE)
    while rest:
        plain = re.match(rb"[^ \t\r\n\"']*", rest)
        assert plain is not None
        word, rest = plain[0], rest[plain.end() :]
        if rest[:1] in (b'"', b"'"):
            quoted = (DOUBLE if rest[:1] == b'"' else SINGLE).match(rest)
            if quoted is None:
                raise Malformed("unbalanced quotes in request")
            word += unescape(quoted[1]) if rest[:1] == b'"' else quoted[1].replace(b"\\'", b"'")
            rest = rest[quoted.end() :]
        argv.append(word)
        rest = rest.lstrip(SPACE)
    return argv


def unescape(text: bytes) -> bytes:
    """The inside of double quotes: ``\\xHH``, ``\\n \\r \\t \\b \\a``; any other escaped byte is itself."""

    def one(match: re.Match[bytes]) -> bytes:
        escaped = match[1].decode("latin-1")
        if len(escaped) == 3:
            return bytes.fromhex(escaped[1:])
        return ESCAPES.get(escaped, escaped.encode("latin-1"))

    return re.sub(rb"\\(x[0-9a-fA-F]{2}|.)", one, text, flags=re.S)


# ---- replies ----


def parse_reply(data: bytes, at: int = 0) -> tuple[Any, int]:
    """One reply and where it ends; the values are those of ``pion._core.reply.ReplyParser``."""
    stop = re.compile(rb"[\r\n]").search(data, at)
    eol = stop.start() if stop else len(data)
    if not b"\r\n".startswith(data[eol : eol + 2]) or data[at : at + 1] == b"\r":
        raise Malformed("a line without its type or its CRLF")
    if data[eol : eol + 2] != b"\r\n":
        raise Incomplete
    kind, text, at = data[at : at + 1], data[at + 1 : eol], eol + 2
    if kind in b"+-:,#(_":
        return scalar(kind, text), at
    size = integer(text)
    if size is None:
        raise Malformed(f"length {text!r}")
    if size == -1 and kind in b"$*":
        return None, at
    if size < 0:
        raise Malformed(f"length {text!r}")
    if kind in b"$=!":
        body, end = data[at : at + size], data[at + size : at + size + 2]
        if not b"\r\n".startswith(end):
            raise Malformed("a bulk without its CRLF")
        if len(end) < 2:
            raise Incomplete
        return bulk(kind, body), at + size + 2
    if kind not in b"*%~>|":
        raise Malformed(f"type {kind!r}")
    items = []
    for _ in range(2 * size if kind in b"%|" else size):
        if data[at : at + 1] == b">":
            raise Malformed("a push inside a reply")
        item, at = parse_reply(data, at)
        items.append(item)
    if kind == b"|":
        return parse_reply(data, at)
    return aggregate(kind, items), at


def scalar(kind: bytes, text: bytes) -> Any:
    """A reply that is one line."""
    number: object = None
    match kind:
        case b"+":
            return text.decode("utf-8", "surrogateescape")
        case b"-":
            return ReplyError(text.decode("utf-8", "replace"))
        case b"_" if not text:
            return None
        case b"#" if text in (b"t", b"f"):
            return text == b"t"
        case b":":
            number = integer(text.removeprefix(b"+"))
            if text.startswith(b"+-"):
                number = None
        case b"(" if re.fullmatch(rb"[+-]?[0-9]{1,4298}", text):
            number = int(text)
        case b"," if re.fullmatch(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|-?(inf|nan)", text, re.I):
            number = float(text)
    if number is None:
        raise Malformed(f"{kind!r} {text!r}")
    return number


def bulk(kind: bytes, body: bytes) -> Any:
    """A reply with a length and a body."""
    if kind == b"!":
        return ReplyError(body.decode("utf-8", "replace"))
    if kind == b"=":
        if body[3:4] != b":":
            raise Malformed("a verbatim string without its format")
        return body[4:]
    return body


def aggregate(kind: bytes, items: list[Any]) -> Any:
    """A reply made of replies."""
    if kind == b"%":
        return {hashable(key): value for key, value in zip(items[::2], items[1::2], strict=True)}
    if kind == b"~":
        return set(map(hashable, items))
    return Push(items) if kind == b">" else items


def hashable(value: Any) -> Any:
    """Map keys and set elements must be hashable in Python."""
    if isinstance(value, list):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return tuple((key, hashable(item)) for key, item in value.items())
    return frozenset(value) if isinstance(value, set) else value


# ---- encoding ----


def encode(value: Any, proto: int) -> bytes:
    """One reply value for protocol 2 or 3; the table is in ``pion.wire.resp``."""
    three = proto == 3
    if isinstance(value, bool):
        return (b"#t\r\n" if value else b"#f\r\n") if three else b":%d\r\n" % value
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return b":%d\r\n" % value
        return b"(%d\r\n" % value if three else encode(b"%d" % value, 2)
    if isinstance(value, float):
        text = double(value)
        return b",%s\r\n" % text if three else encode(text, 2)
    if value is None:
        return b"_\r\n" if three else b"$-1\r\n"
    if value is NULL_ARRAY:
        return b"_\r\n" if three else b"*-1\r\n"
    if isinstance(value, str):
        return encode(value.encode(), proto)
    if isinstance(value, bytes | bytearray | memoryview):
        return b"$%d\r\n%s\r\n" % (len(bytes(value)), bytes(value))
    if isinstance(value, Simple | Err):
        mark = b"+" if isinstance(value, Simple) else b"-"
        return mark + value.value.replace(b"\r", b" ").replace(b"\n", b" ") + b"\r\n"
    if isinstance(value, Verbatim):
        text = value.value
        return b"=%d\r\ntxt:%s\r\n" % (len(text) + 4, text) if three else encode(text, 2)
    if isinstance(value, Raw):
        return value.value
    if isinstance(value, dict):
        flat = [item for pair in value.items() for item in pair]
        return many(b"%", len(value), flat, 3) if three else many(b"*", len(flat), flat, 2)
    if isinstance(value, set | frozenset):
        return many(b"~" if three else b"*", len(value), list(value), proto)
    if isinstance(value, Push):
        return many(b">" if three else b"*", len(value.items), value.items, proto)
    return many(b"*", len(value), list(value), proto)


def many(mark: bytes, count: int, items: list[Any], proto: int) -> bytes:
    """An aggregate: its header and its items."""
    return b"%s%d\r\n" % (mark, count) + b"".join(encode(item, proto) for item in items)


def double(value: float) -> bytes:
    """The shortest text that reads back the same; whole numbers of up to 17 digits without a point."""
    if math.isnan(value):
        return b"nan"
    if value == 0:
        return b"-0" if math.copysign(1, value) < 0 else b"0"
    if abs(value) < 1e17 and value == int(value):
        return b"%d" % int(value)
    return repr(value).encode()
