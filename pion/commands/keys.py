"""Keys of any type: existence, expiry, renaming, walking and flushing."""

from __future__ import annotations

import re
from typing import Any

from pion import errors
from pion.commands import args, effects
from pion.commands.connection import database
from pion.commands.dispatch import Context
from pion.commands.table import command
from pion.errors import CommandError
from pion.wire.resp import OK, Simple

_CURSOR = re.compile(rb"(?:[+-]?[0-9]{1,40})?")
_SCAN_COUNT = 10  # Redis's default for COUNT


def _delete(ctx: Context, argv: list[bytes]) -> int:
    return sum(ctx.ks.delete(ctx.db, key) for key in argv[1:])


@command("DEL", -2, "write", 1, -1, 1, "generic", "1.0.0", "Deletes keys.", "O(N) where N is the number of keys",
         keys="RM delete", fast="DEL")  # fmt: skip
def del_(ctx: Context, argv: list[bytes]) -> Any:
    return _delete(ctx, argv)


@command("UNLINK", -2, "write fast", 1, -1, 1, "generic", "4.0.0", "Deletes keys.",
         "O(1) for each key", keys="RM delete")  # fmt: skip
def unlink(ctx: Context, argv: list[bytes]) -> Any:
    return _delete(ctx, argv)


@command("EXISTS", -2, "readonly fast", 1, -1, 1, "generic", "1.0.0", "How many of the keys exist.",
         "O(N) where N is the number of keys", keys="RO", fast="EXISTS")  # fmt: skip
def exists(ctx: Context, argv: list[bytes]) -> Any:
    return sum(bool(ctx.ks.exists(ctx.db, key, count=True)) for key in argv[1:])


@command("TOUCH", -2, "readonly fast", 1, -1, 1, "generic", "3.2.1", "Marks keys as used; answers how many exist.",
         "O(N) where N is the number of keys", keys="RO")  # fmt: skip
def touch(ctx: Context, argv: list[bytes]) -> Any:
    return sum(bool(ctx.ks.touch(ctx.db, key)) for key in argv[1:])


@command("TYPE", 2, "readonly fast", 1, 1, 1, "generic", "1.0.0", "The type of the value at a key.", "O(1)",
         keys="RO")  # fmt: skip
def type_(ctx: Context, argv: list[bytes]) -> Any:
    return Simple(ctx.ks.type(ctx.db, argv[1]) or b"none")


# --- expiry --------------------------------------------------------------------------------------------------------


def condition(tokens: list[bytes]) -> set[bytes]:
    """The NX, XX, GT and LT of an EXPIRE."""
    given: set[bytes] = set()
    for token in tokens:
        option = args.upper(token)
        if option not in (b"NX", b"XX", b"GT", b"LT"):
            raise CommandError(f"ERR Unsupported option {args.text(token)}")
        given.add(option)
    if b"NX" in given and len(given) > 1:
        raise CommandError(errors.EXPIRE_NX_CLASH)
    if {b"GT", b"LT"} <= given:
        raise CommandError(errors.EXPIRE_GT_LT)
    return given


def _expire(ctx: Context, argv: list[bytes], unit: int, relative: bool) -> int:
    given = condition(argv[3:])
    value = args.integer(argv[2])
    now = ctx.now_ms()
    base = now if relative else 0
    if not args.INT64_MIN <= value * unit <= args.INT64_MAX - base:
        raise errors.expire_time(argv[0].decode().lower())
    when = value * unit + base
    current = ctx.ks.expire_at(ctx.db, argv[1])
    if current == -2:
        return 0
    refused = (
        (b"NX" in given and current != -1)
        or (b"XX" in given and current == -1)
        or (b"GT" in given and (current == -1 or when <= current))
        or (b"LT" in given and current != -1 and when >= current)
    )
    if refused:
        return 0
    if when <= now:
        ctx.ks.delete(ctx.db, argv[1])
    else:
        ctx.ks.set_expire(ctx.db, argv[1], when)
    return 1


@command("EXPIRE", -3, "write fast", 1, 1, 1, "generic", "1.0.0", "Sets the time to live in seconds.", "O(1)",
         keys="RW update")  # fmt: skip
def expire(ctx: Context, argv: list[bytes]) -> Any:
    return _expire(ctx, argv, 1000, True)


@command("PEXPIRE", -3, "write fast", 1, 1, 1, "generic", "2.6.0", "Sets the time to live in milliseconds.", "O(1)",
         keys="RW update")  # fmt: skip
def pexpire(ctx: Context, argv: list[bytes]) -> Any:
    return _expire(ctx, argv, 1, True)


@command("EXPIREAT", -3, "write fast", 1, 1, 1, "generic", "1.2.0", "Sets the expiry as a Unix time in seconds.",
         "O(1)", keys="RW update")  # fmt: skip
def expireat(ctx: Context, argv: list[bytes]) -> Any:
    return _expire(ctx, argv, 1000, False)


@command("PEXPIREAT", -3, "write fast", 1, 1, 1, "generic", "2.6.0",
         "Sets the expiry as a Unix time in milliseconds.", "O(1)", keys="RW update")  # fmt: skip
def pexpireat(ctx: Context, argv: list[bytes]) -> Any:
    return _expire(ctx, argv, 1, False)


def _seconds(milliseconds: int) -> int:
    """Rounded to the nearest second, as Redis shows it."""
    return (milliseconds + 500) // 1000


def _remaining(ctx: Context, key: bytes) -> int:
    """Milliseconds to live; -1 = for ever, -2 = no such key."""
    when = int(ctx.ks.expire_at(ctx.db, key))
    return when if when < 0 else max(0, when - ctx.now_ms())


@command("TTL", 2, "readonly fast", 1, 1, 1, "generic", "1.0.0", "The time to live in seconds.", "O(1)",
         keys="RO access")  # fmt: skip
def ttl(ctx: Context, argv: list[bytes]) -> Any:
    left = _remaining(ctx, argv[1])
    return left if left < 0 else _seconds(left)


@command("PTTL", 2, "readonly fast", 1, 1, 1, "generic", "2.6.0", "The time to live in milliseconds.", "O(1)",
         keys="RO access")  # fmt: skip
def pttl(ctx: Context, argv: list[bytes]) -> Any:
    return _remaining(ctx, argv[1])


@command("EXPIRETIME", 2, "readonly fast", 1, 1, 1, "generic", "7.0.0", "The expiry as a Unix time in seconds.",
         "O(1)", keys="RO access")  # fmt: skip
def expiretime(ctx: Context, argv: list[bytes]) -> Any:
    when = int(ctx.ks.expire_at(ctx.db, argv[1]))
    return when if when < 0 else _seconds(when)


@command("PEXPIRETIME", 2, "readonly fast", 1, 1, 1, "generic", "7.0.0",
         "The expiry as a Unix time in milliseconds.", "O(1)", keys="RO access")  # fmt: skip
def pexpiretime(ctx: Context, argv: list[bytes]) -> Any:
    return int(ctx.ks.expire_at(ctx.db, argv[1]))


@command("PERSIST", 2, "write fast", 1, 1, 1, "generic", "2.2.0", "Removes the time to live.", "O(1)",
         keys="RW update")  # fmt: skip
def persist(ctx: Context, argv: list[bytes]) -> Any:
    if ctx.ks.expire_at(ctx.db, argv[1]) < 0:
        return 0
    ctx.ks.persist(ctx.db, argv[1])
    return 1


# --- names ---------------------------------------------------------------------------------------------------------


def _present(ctx: Context, key: bytes) -> None:
    if not ctx.ks.exists(ctx.db, key):
        raise CommandError(errors.NO_SUCH_KEY)


@command("RENAME", 3, "write", 1, 2, 1, "generic", "1.0.0", "Renames a key, over an existing one if need be.", "O(1)",
         keys="RW access delete; OW update")  # fmt: skip
def rename(ctx: Context, argv: list[bytes]) -> Any:
    _present(ctx, argv[1])
    if argv[1] != argv[2]:
        ctx.ks.rename(ctx.db, argv[1], argv[2])
    return OK


@command("RENAMENX", 3, "write fast", 1, 2, 1, "generic", "1.0.0", "Renames a key if the new name is free.", "O(1)",
         keys="RW access delete; OW insert")  # fmt: skip
def renamenx(ctx: Context, argv: list[bytes]) -> Any:
    _present(ctx, argv[1])
    if ctx.ks.exists(ctx.db, argv[2]):
        return 0
    ctx.ks.rename(ctx.db, argv[1], argv[2])
    return 1


@command("COPY", -3, "write denyoom", 1, 2, 1, "generic", "6.2.0", "Copies a value, its time to live included.",
         "O(N) where N is the size of the value", keys="RO access; OW update")  # fmt: skip
def copy(ctx: Context, argv: list[bytes]) -> Any:
    target_db, replace, i = ctx.db, False, 3
    while i < len(argv):
        option = args.upper(argv[i])
        if option == b"REPLACE":
            replace = True
        elif option == b"DB" and i + 1 < len(argv):
            i += 1
            target_db = database(ctx, argv[i])
        else:
            raise CommandError(errors.SYNTAX)
        i += 1
    if target_db == ctx.db and argv[1] == argv[2]:
        raise CommandError(errors.SAME_OBJECT)
    value = ctx.ks.get(ctx.db, argv[1])
    if value is None:
        return 0
    if ctx.ks.exists(target_db, argv[2]):
        if not replace:
            return 0
        ctx.ks.delete(target_db, argv[2])
    expire_ms = max(0, ctx.ks.expire_at(ctx.db, argv[1]))
    if isinstance(value, bytes):
        ctx.ks.set(target_db, argv[2], value, expire_ms)
    else:
        effects.put_copy(ctx, target_db, argv[2], value, ctx.ks.memory(ctx.db, argv[1]))
        if expire_ms:
            ctx.ks.set_expire(target_db, argv[2], expire_ms)
    return 1


@command("RANDOMKEY", 1, "readonly", 0, 0, 0, "generic", "1.0.0", "One key, picked by chance.", "O(1)")
def randomkey(ctx: Context, _argv: list[bytes]) -> Any:
    return ctx.ks.random(ctx.db)


@command("KEYS", 2, "readonly", 0, 0, 0, "generic", "1.0.0", "All keys that match a pattern.",
         "O(N) where N is the number of keys in the database", acl="dangerous")  # fmt: skip
def keys(ctx: Context, argv: list[bytes]) -> Any:
    if argv[1] == b"*":
        return list(ctx.ks.keys(ctx.db))
    matches = args.compile_glob(argv[1]).fullmatch
    return [key for key in ctx.ks.keys(ctx.db) if matches(key)]


def scan_options(tokens: list[bytes], with_type: bool) -> tuple[bytes | None, int, bytes | None]:
    """(MATCH, COUNT, TYPE) of SCAN (`with_type`), HSCAN and ZSCAN."""
    pattern, count, kind = None, _SCAN_COUNT, None
    for i in range(0, len(tokens), 2):
        option = args.upper(tokens[i])
        if i + 1 == len(tokens):
            raise CommandError(errors.SYNTAX)
        if option == b"COUNT":
            count = args.integer(tokens[i + 1])
            if count < 1:
                raise CommandError(errors.SYNTAX)
        elif option == b"MATCH":
            pattern = None if tokens[i + 1] == b"*" else tokens[i + 1]
        elif option == b"TYPE" and with_type:
            kind = tokens[i + 1].lower()
        else:
            raise CommandError(errors.SYNTAX)
    return pattern, count, kind


def cursor(raw: bytes) -> int:
    """An unsigned 64-bit SCAN cursor, read as C's strtoul does: nothing is 0, a negative number wraps."""
    if not _CURSOR.fullmatch(raw) or abs(int(raw or b"0")) >= 1 << 64:
        raise CommandError(errors.INVALID_CURSOR)
    return int(raw or b"0") % (1 << 64)


@command("SCAN", -2, "readonly", 0, 0, 0, "generic", "2.8.0", "Walks the keys of the database in steps.",
         "O(1) for every call, O(N) for a complete walk")  # fmt: skip
def scan(ctx: Context, argv: list[bytes]) -> Any:
    at = cursor(argv[1])
    pattern, count, kind = scan_options(argv[2:], with_type=True)
    following, found = ctx.ks.scan(ctx.db, at, count, pattern, kind)
    return [b"%d" % following, found]


@command("DBSIZE", 1, "readonly fast", 0, 0, 0, "server", "1.0.0", "The number of keys in the database.", "O(1)",
         acl="keyspace")  # fmt: skip
def dbsize(ctx: Context, _argv: list[bytes]) -> Any:
    return ctx.ks.size(ctx.db)


def _flush_mode(argv: list[bytes]) -> None:
    if len(argv) > 2 or (len(argv) == 2 and args.upper(argv[1]) not in (b"SYNC", b"ASYNC")):
        raise CommandError(errors.SYNTAX)


@command("FLUSHDB", -1, "write", 0, 0, 0, "server", "1.0.0", "Deletes all keys of the database.",
         "O(N) where N is the number of keys in the database", acl="keyspace dangerous")  # fmt: skip
def flushdb(ctx: Context, argv: list[bytes]) -> Any:
    _flush_mode(argv)
    ctx.ks.flush(ctx.db)
    return OK


@command("FLUSHALL", -1, "write", 0, 0, 0, "server", "1.0.0",
         "Deletes all keys of all databases; prefixes have KV.PREFIX.FLUSH.", "O(N) where N is the number of keys",
         acl="keyspace dangerous")  # fmt: skip
def flushall(ctx: Context, argv: list[bytes]) -> Any:
    _flush_mode(argv)
    ctx.ks.flush(None)
    return OK
