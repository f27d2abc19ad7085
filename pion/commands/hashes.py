"""Hashes: a dict of fields per key. Effects are logged as fields set and fields removed."""

from __future__ import annotations

import secrets
from typing import Any

from pion import errors
from pion.commands import args, effects
from pion.commands.dispatch import Context
from pion.commands.keys import cursor, scan_options
from pion.commands.strings import add_floats
from pion.commands.table import command
from pion.errors import CommandError, WrongTypeError
from pion.wire.resp import OK

Hash = dict[bytes, bytes]

_N_FIELDS = "O(N) where N is the number of fields"


def read(ctx: Context, key: bytes) -> Hash | None:
    """The hash at `key`, None when there is no key.

    Raises:
        WrongTypeError: the key holds something else.
    """
    value = ctx.ks.get(ctx.db, key)
    if value is None or type(value) is dict:
        return value
    raise WrongTypeError


def write(ctx: Context, key: bytes, pairs: list[tuple[bytes, bytes]]) -> int:
    """Sets fields, making the hash when it is missing; returns how many were new."""
    fields = read(ctx, key)
    fresh = fields is None
    if fields is None:
        fields = {}
    before, grown = len(fields), 0
    for field, value in pairs:
        old = fields.get(field)
        grown += len(value) + (len(field) + effects.ELEMENT_BYTES if old is None else -len(old))
        fields[field] = value
    effects.hash_set(ctx, key, fields, fresh, pairs, grown)
    return len(fields) - before


@command("HSET", -4, "write denyoom fast", 1, 1, 1, "hash", "2.0.0", "Sets fields of a hash.", _N_FIELDS,
         keys="RW update")  # fmt: skip
def hset(ctx: Context, argv: list[bytes]) -> Any:
    return write(ctx, argv[1], _pairs(argv, "hset"))


@command("HMSET", -4, "write denyoom fast", 1, 1, 1, "hash", "2.0.0", "Sets fields of a hash; HSET does the same.",
         _N_FIELDS, keys="RW update")  # fmt: skip
def hmset(ctx: Context, argv: list[bytes]) -> Any:
    write(ctx, argv[1], _pairs(argv, "hmset"))
    return OK


def _pairs(argv: list[bytes], name: str) -> list[tuple[bytes, bytes]]:
    if len(argv) % 2:
        raise errors.wrong_arity(name)
    return list(zip(argv[2::2], argv[3::2], strict=True))


@command("HSETNX", 4, "write denyoom fast", 1, 1, 1, "hash", "2.0.0", "Sets a field that is not there yet.", "O(1)",
         keys="RW insert")  # fmt: skip
def hsetnx(ctx: Context, argv: list[bytes]) -> Any:
    fields = read(ctx, argv[1])
    if fields is not None and argv[2] in fields:
        return 0
    return write(ctx, argv[1], [(argv[2], argv[3])])


@command("HGET", 3, "readonly fast", 1, 1, 1, "hash", "2.0.0", "The value of a field.", "O(1)", keys="RO access")
def hget(ctx: Context, argv: list[bytes]) -> Any:
    return (read(ctx, argv[1]) or {}).get(argv[2])


@command("HMGET", -3, "readonly fast", 1, 1, 1, "hash", "2.0.0", "The values of several fields.", _N_FIELDS,
         keys="RO access")  # fmt: skip
def hmget(ctx: Context, argv: list[bytes]) -> Any:
    fields = read(ctx, argv[1]) or {}
    return [fields.get(field) for field in argv[2:]]


@command("HGETALL", 2, "readonly", 1, 1, 1, "hash", "2.0.0", "All fields and values.", _N_FIELDS, keys="RO access")
def hgetall(ctx: Context, argv: list[bytes]) -> Any:
    return dict(read(ctx, argv[1]) or {})


@command("HDEL", -3, "write fast", 1, 1, 1, "hash", "2.0.0", "Removes fields; the last one takes the key with it.",
         _N_FIELDS, keys="RW delete")  # fmt: skip
def hdel(ctx: Context, argv: list[bytes]) -> Any:
    fields = read(ctx, argv[1])
    if fields is None:
        return 0
    gone, freed = [], 0
    for field in argv[2:]:
        value = fields.pop(field, None)
        if value is not None:
            gone.append(field)
            freed += len(field) + len(value) + effects.ELEMENT_BYTES
    if gone:
        effects.hash_deleted(ctx, argv[1], fields, gone, freed)
    return len(gone)


@command("HLEN", 2, "readonly fast", 1, 1, 1, "hash", "2.0.0", "The number of fields.", "O(1)", keys="RO")
def hlen(ctx: Context, argv: list[bytes]) -> Any:
    return len(read(ctx, argv[1]) or {})


@command("HEXISTS", 3, "readonly fast", 1, 1, 1, "hash", "2.0.0", "Whether a field is there.", "O(1)", keys="RO")
def hexists(ctx: Context, argv: list[bytes]) -> Any:
    return int(argv[2] in (read(ctx, argv[1]) or {}))


@command("HKEYS", 2, "readonly", 1, 1, 1, "hash", "2.0.0", "All fields.", _N_FIELDS, keys="RO access")
def hkeys(ctx: Context, argv: list[bytes]) -> Any:
    return list(read(ctx, argv[1]) or {})


@command("HVALS", 2, "readonly", 1, 1, 1, "hash", "2.0.0", "All values.", _N_FIELDS, keys="RO access")
def hvals(ctx: Context, argv: list[bytes]) -> Any:
    return list((read(ctx, argv[1]) or {}).values())


@command("HSTRLEN", 3, "readonly fast", 1, 1, 1, "hash", "3.2.0", "The length of a field's value.", "O(1)", keys="RO")
def hstrlen(ctx: Context, argv: list[bytes]) -> Any:
    return len((read(ctx, argv[1]) or {}).get(argv[2], b""))


@command("HINCRBY", 4, "write denyoom fast", 1, 1, 1, "hash", "2.0.0", "Adds to the integer in a field.", "O(1)",
         keys="RW access update")  # fmt: skip
def hincrby(ctx: Context, argv: list[bytes]) -> Any:
    delta = args.integer(argv[3])
    old = (read(ctx, argv[1]) or {}).get(argv[2])
    total = delta + (args.integer(old, errors.HASH_NOT_INTEGER) if old is not None else 0)
    if not args.INT64_MIN <= total <= args.INT64_MAX:
        raise CommandError(errors.INCR_OVERFLOW)
    write(ctx, argv[1], [(argv[2], b"%d" % total)])
    return total


@command("HINCRBYFLOAT", 4, "write denyoom fast", 1, 1, 1, "hash", "2.6.0", "Adds to the number in a field.", "O(1)",
         keys="RW access update")  # fmt: skip
def hincrbyfloat(ctx: Context, argv: list[bytes]) -> Any:
    if args.long_double(argv[3]) is None:
        raise CommandError(errors.NAN_OR_INFINITY)
    old = (read(ctx, argv[1]) or {}).get(argv[2])
    total = add_floats(old, argv[3], errors.HASH_NOT_FLOAT)
    write(ctx, argv[1], [(argv[2], total)])
    return total


@command("HRANDFIELD", -2, "readonly", 1, 1, 1, "hash", "6.2.0", "Fields picked by chance.", _N_FIELDS,
         keys="RO access")  # fmt: skip
def hrandfield(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) == 2:
        fields = read(ctx, argv[1])
        return secrets.choice(list(fields)) if fields else None
    count = args.integer(argv[2])
    with_values = len(argv) == 4 and args.upper(argv[3]) == b"WITHVALUES"
    if len(argv) > 4 or (len(argv) == 4 and not with_values):
        raise CommandError(errors.SYNTAX)
    if count == args.INT64_MIN:
        raise CommandError(errors.NOT_INT63)
    if with_values and abs(count) > args.INT64_MAX // 2:
        raise CommandError(errors.OUT_OF_RANGE)
    fields = read(ctx, argv[1]) or {}
    names = list(fields)
    picker = secrets.SystemRandom()
    if count < -_RANDOM_MAX and names:
        raise CommandError(errors.OUT_OF_RANGE)
    if count < 0:
        chosen = picker.choices(names, k=-count) if names else []
    else:
        chosen = picker.sample(names, min(count, len(names)))
    if not with_values:
        return chosen
    if ctx.conn.proto == 3:
        return [[name, fields[name]] for name in chosen]
    return [item for name in chosen for item in (name, fields[name])]


_RANDOM_MAX = 1_000_000  # repeats asked for with a negative count


@command("HSCAN", -3, "readonly", 1, 1, 1, "hash", "2.8.0", "Walks the fields in steps.",
         "O(1) for every call, O(N) for a complete walk", keys="RO access")  # fmt: skip
def hscan(ctx: Context, argv: list[bytes]) -> Any:
    at = cursor(argv[2])
    fields = read(ctx, argv[1])
    if fields is None:
        return [b"0", []]
    pattern, count, _ = scan_options(argv[3:], with_type=False)
    following, names = ctx.server.scans.step(fields, fields, len(fields), at, count)
    matches = args.compile_glob(pattern).fullmatch if pattern is not None else None
    found: list[bytes] = []
    for name in names:
        value = fields.get(name)
        if value is not None and (matches is None or matches(name)):
            found += (name, value)
    return [b"%d" % following, found]
