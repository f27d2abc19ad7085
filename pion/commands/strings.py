"""Strings. Every change is logged by the keyspace itself; expiry goes in as an absolute time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pion import errors, limits
from pion.commands import args
from pion.commands.dispatch import Context
from pion.commands.table import command
from pion.errors import CommandError, WrongTypeError
from pion.wire.resp import OK

_UNITS = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}


def read(ctx: Context, key: bytes) -> bytes | None:
    """The string at `key`, None when there is no key.

    Raises:
        WrongTypeError: the key holds something else.
    """
    value = ctx.ks.get(ctx.db, key)
    if value is None or isinstance(value, bytes):
        return value
    raise WrongTypeError


def deadline(ctx: Context, name: str, raw: bytes, unit: int, relative: bool) -> int:
    """An absolute expiry in milliseconds from the argument of EX, PX, EXAT, PXAT.

    Raises:
        CommandError: no integer, zero or negative, or past the end of 64-bit time.
    """
    value = args.integer(raw)
    base = ctx.now_ms() if relative else 0
    if value <= 0 or value > args.INT64_MAX // unit or value * unit > args.INT64_MAX - base:
        raise errors.expire_time(name)
    return value * unit + base


@dataclass(slots=True)
class SetOptions:
    """Options of SET and GETEX as parsed; `expiry` is (argument, unit in ms, relative to now)."""

    only: bytes | None = None  # NX or XX
    get: bool = False
    keepttl: bool = False
    persist: bool = False
    expiry: tuple[bytes, int, bool] | None = None
    expiry_name: bytes | None = None


def parse_options(tokens: list[bytes], for_set: bool) -> SetOptions:
    """Options of SET (`for_set`) or GETEX. A repeated option wins over its first value, another kind is refused."""
    out, i = SetOptions(), 0
    while i < len(tokens):
        option = args.upper(tokens[i])
        if for_set and option in (b"NX", b"XX") and out.only in (None, option):
            out.only = option
        elif for_set and option == b"GET":
            out.get = True
        elif for_set and option == b"KEEPTTL" and out.expiry is None:
            out.keepttl = True
        elif not for_set and option == b"PERSIST" and out.expiry is None:
            out.persist = True
        elif (
            option in _UNITS
            and i + 1 < len(tokens)
            and not (out.keepttl or out.persist)
            and out.expiry_name in (None, option)
        ):
            out.expiry_name = option
            out.expiry = (tokens[i + 1], *_UNITS[option])
            i += 1
        else:
            raise CommandError(errors.SYNTAX)
        i += 1
    return out


@command(
    "GET", 2, "readonly fast", 1, 1, 1, "string", "1.0.0", "The value of a key.", "O(1)",
    keys="RO access", fast="GET",
)  # fmt: skip
def get(ctx: Context, argv: list[bytes]) -> Any:
    return read(ctx, argv[1])


@command(
    "SET", -3, "write denyoom", 1, 1, 1, "string", "1.0.0",
    "Sets the value of a key, whatever it held before.", "O(1)", keys="RW access update variable_flags", fast="SET",
)  # fmt: skip
def set_(ctx: Context, argv: list[bytes]) -> Any:
    options = parse_options(argv[3:], for_set=True)
    expire = deadline(ctx, "set", *options.expiry) if options.expiry else 0
    key = argv[1]
    old = read(ctx, key) if options.get else None
    if options.only is not None:
        present = old is not None or ctx.ks.exists(ctx.db, key)
        if present == (options.only == b"NX"):
            return old
    ctx.ks.set(ctx.db, key, argv[2], expire, options.keepttl)
    return old if options.get else OK


@command("SETNX", 3, "write denyoom fast", 1, 1, 1, "string", "1.0.0",
         "Sets a key that does not exist yet.", "O(1)", keys="OW insert")  # fmt: skip
def setnx(ctx: Context, argv: list[bytes]) -> Any:
    if ctx.ks.exists(ctx.db, argv[1]):
        return 0
    ctx.ks.set(ctx.db, argv[1], argv[2])
    return 1


@command("SETEX", 4, "write denyoom", 1, 1, 1, "string", "2.0.0",
         "Sets a key and its time to live in seconds.", "O(1)", keys="OW update")  # fmt: skip
def setex(ctx: Context, argv: list[bytes]) -> Any:
    ctx.ks.set(ctx.db, argv[1], argv[3], deadline(ctx, "setex", argv[2], 1000, True))
    return OK


@command("PSETEX", 4, "write denyoom", 1, 1, 1, "string", "2.6.0",
         "Sets a key and its time to live in milliseconds.", "O(1)", keys="OW update")  # fmt: skip
def psetex(ctx: Context, argv: list[bytes]) -> Any:
    ctx.ks.set(ctx.db, argv[1], argv[3], deadline(ctx, "psetex", argv[2], 1, True))
    return OK


@command("GETSET", 3, "write denyoom fast", 1, 1, 1, "string", "1.0.0",
         "Sets a key and answers its old value.", "O(1)", keys="RW access update")  # fmt: skip
def getset(ctx: Context, argv: list[bytes]) -> Any:
    old = read(ctx, argv[1])
    ctx.ks.set(ctx.db, argv[1], argv[2])
    return old


@command("GETDEL", 2, "write fast", 1, 1, 1, "string", "6.2.0",
         "Answers the value of a key and deletes the key.", "O(1)", keys="RW access delete")  # fmt: skip
def getdel(ctx: Context, argv: list[bytes]) -> Any:
    old = read(ctx, argv[1])
    if old is not None:
        ctx.ks.delete(ctx.db, argv[1])
    return old


@command("GETEX", -2, "write fast", 1, 1, 1, "string", "6.2.0",
         "Answers the value of a key and changes its time to live.", "O(1)", keys="RW access update")  # fmt: skip
def getex(ctx: Context, argv: list[bytes]) -> Any:
    options = parse_options(argv[2:], for_set=False)
    key = argv[1]
    value = read(ctx, key)
    if value is None:
        return None
    if options.expiry is not None:
        expire = deadline(ctx, "getex", *options.expiry)
        if expire <= ctx.now_ms():
            ctx.ks.delete(ctx.db, key)
        else:
            ctx.ks.set_expire(ctx.db, key, expire)
    elif options.persist:
        ctx.ks.persist(ctx.db, key)
    return value


@command("MGET", -2, "readonly fast", 1, -1, 1, "string", "1.0.0", "The values of several keys.",
         "O(N) where N is the number of keys", keys="RO access", fast="MGET")  # fmt: skip
def mget(ctx: Context, argv: list[bytes]) -> Any:
    values = (ctx.ks.get(ctx.db, key) for key in argv[1:])
    return [value if isinstance(value, bytes) else None for value in values]


def _pairs(argv: list[bytes], name: str) -> list[tuple[bytes, bytes]]:
    if len(argv) % 2 == 0:
        raise errors.wrong_arity(name)
    return list(zip(argv[1::2], argv[2::2], strict=True))


@command("MSET", -3, "write denyoom", 1, -1, 2, "string", "1.0.1", "Sets several keys.",
         "O(N) where N is the number of keys", keys="OW update")  # fmt: skip
def mset(ctx: Context, argv: list[bytes]) -> Any:
    for key, value in _pairs(argv, "mset"):
        ctx.ks.set(ctx.db, key, value)
    return OK


@command("MSETNX", -3, "write denyoom", 1, -1, 2, "string", "1.0.1",
         "Sets several keys if none of them exists.", "O(N) for N keys", keys="OW insert")  # fmt: skip
def msetnx(ctx: Context, argv: list[bytes]) -> Any:
    pairs = _pairs(argv, "msetnx")
    if any(ctx.ks.exists(ctx.db, key) for key, _ in pairs):
        return 0
    for key, value in pairs:
        ctx.ks.set(ctx.db, key, value)
    return 1


def _add(ctx: Context, key: bytes, delta: int) -> int:
    return int(ctx.ks.incr(ctx.db, key, delta))


@command("INCR", 2, "write denyoom fast", 1, 1, 1, "string", "1.0.0", "Adds one to the integer at a key.", "O(1)",
         keys="RW access update", fast="INCR")  # fmt: skip
def incr(ctx: Context, argv: list[bytes]) -> Any:
    return _add(ctx, argv[1], 1)


@command("DECR", 2, "write denyoom fast", 1, 1, 1, "string", "1.0.0", "Takes one off the integer at a key.", "O(1)",
         keys="RW access update")  # fmt: skip
def decr(ctx: Context, argv: list[bytes]) -> Any:
    return _add(ctx, argv[1], -1)


@command("INCRBY", 3, "write denyoom fast", 1, 1, 1, "string", "1.0.0", "Adds to the integer at a key.", "O(1)",
         keys="RW access update")  # fmt: skip
def incrby(ctx: Context, argv: list[bytes]) -> Any:
    return _add(ctx, argv[1], args.integer(argv[2]))


@command("DECRBY", 3, "write denyoom fast", 1, 1, 1, "string", "1.0.0", "Subtracts from the integer at a key.", "O(1)",
         keys="RW access update")  # fmt: skip
def decrby(ctx: Context, argv: list[bytes]) -> Any:
    delta = args.integer(argv[2])
    if delta == args.INT64_MIN:
        raise CommandError(errors.DECR_OVERFLOW)
    return _add(ctx, argv[1], -delta)


def add_floats(old: bytes | None, delta: bytes, bad_old: str) -> bytes:
    """The sum as INCRBYFLOAT and HINCRBYFLOAT store it.

    Raises:
        CommandError: one of the two is no number (`bad_old` for the stored one) or the sum is not finite.
    """
    value = args.long_double(old, bad_old) if old is not None else args.long_double(b"0")
    step = args.long_double(delta)
    total = None if value is None or step is None else args.round_long_double(value + step)
    if total is None:
        raise CommandError(errors.INCR_NAN)
    return args.format_long_double(total)


@command("INCRBYFLOAT", 3, "write denyoom fast", 1, 1, 1, "string", "2.6.0", "Adds to the number at a key.", "O(1)",
         keys="RW access update")  # fmt: skip
def incrbyfloat(ctx: Context, argv: list[bytes]) -> Any:
    total = add_floats(read(ctx, argv[1]), argv[2], errors.NOT_FLOAT)
    ctx.ks.set(ctx.db, argv[1], total, keepttl=True)
    return total


@command("APPEND", 3, "write denyoom fast", 1, 1, 1, "string", "2.0.0", "Appends to the string at a key.",
         "O(1) amortized", keys="RW insert")  # fmt: skip
def append(ctx: Context, argv: list[bytes]) -> Any:
    if ctx.ks.strlen(ctx.db, argv[1]) + len(argv[2]) > limits.STRING_MAX:
        raise CommandError(errors.STRING_TOO_LONG)
    if not argv[2] and not ctx.ks.exists(ctx.db, argv[1]):
        ctx.ks.set(ctx.db, argv[1], b"")  # Redis makes the key even for nothing
        return 0
    return ctx.ks.append(ctx.db, argv[1], argv[2])


@command("STRLEN", 2, "readonly fast", 1, 1, 1, "string", "2.2.0", "The length of the string at a key.", "O(1)",
         keys="RO")  # fmt: skip
def strlen(ctx: Context, argv: list[bytes]) -> Any:
    return ctx.ks.strlen(ctx.db, argv[1])


def _getrange(ctx: Context, argv: list[bytes]) -> bytes:
    start, end = args.integer(argv[2]), args.integer(argv[3])
    value = read(ctx, argv[1]) or b""
    size = len(value)
    if start < 0 and end < 0 and start > end:
        return b""
    start = max(0, start + size if start < 0 else start)
    end = min(size - 1, max(0, end + size if end < 0 else end))
    return value[start : end + 1] if size and start <= end else b""


@command("GETRANGE", 4, "readonly", 1, 1, 1, "string", "2.4.0", "A part of the string at a key.",
         "O(N) where N is the length of the answer", keys="RO access")  # fmt: skip
def getrange(ctx: Context, argv: list[bytes]) -> Any:
    return _getrange(ctx, argv)


@command("SUBSTR", 4, "readonly", 1, 1, 1, "string", "1.0.0", "The old name of GETRANGE.",
         "O(N) where N is the length of the answer", keys="RO access")  # fmt: skip
def substr(ctx: Context, argv: list[bytes]) -> Any:
    return _getrange(ctx, argv)


@command("SETRANGE", 4, "write denyoom", 1, 1, 1, "string", "2.2.0", "Overwrites a part of the string at a key.",
         "O(N) where N is the length of the value", keys="RW update")  # fmt: skip
def setrange(ctx: Context, argv: list[bytes]) -> Any:
    offset = args.integer(argv[2])
    if offset < 0:
        raise CommandError(errors.OFFSET_RANGE)
    length = ctx.ks.strlen(ctx.db, argv[1])
    if not argv[3]:
        return length
    if offset + len(argv[3]) > limits.STRING_MAX:
        raise CommandError(errors.STRING_TOO_LONG)
    return ctx.ks.write(ctx.db, argv[1], offset, argv[3])
