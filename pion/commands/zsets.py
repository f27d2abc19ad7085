"""Sorted sets: reading and writing single members. Ranges are in `zranges.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pion import errors
from pion.commands import args, effects
from pion.commands.dispatch import Context
from pion.commands.keys import cursor, scan_options
from pion.commands.table import command
from pion.errors import CommandError, WrongTypeError
from pion.store.keyspace.zset import ZSet

_LOG_N = "O(log(N)) where N is the number of members"


def read(ctx: Context, key: bytes) -> ZSet | None:
    """The sorted set at `key`, None when there is no key.

    Raises:
        WrongTypeError: the key holds something else.
    """
    value = ctx.ks.get(ctx.db, key)
    if value is None or isinstance(value, ZSet):
        return value
    raise WrongTypeError


@dataclass(slots=True)
class AddOptions:
    """NX, XX, GT, LT, CH and INCR of ZADD."""

    nx: bool = False
    xx: bool = False
    gt: bool = False
    lt: bool = False
    ch: bool = False
    incr: bool = False


def parse_add(argv: list[bytes], incr: bool = False) -> tuple[AddOptions, list[tuple[float, bytes]]]:
    """Options and (score, member) pairs of ZADD; with `incr` of ZINCRBY, which Redis parses as ZADD ... INCR."""
    options, i = AddOptions(incr=incr), 2
    names = {b"NX": "nx", b"XX": "xx", b"GT": "gt", b"LT": "lt", b"CH": "ch", b"INCR": "incr"}
    while i < len(argv) and (name := names.get(args.upper(argv[i]))):
        setattr(options, name, True)
        i += 1
    rest = argv[i:]
    if not rest or len(rest) % 2:
        raise CommandError(errors.SYNTAX)
    if options.nx and options.xx:
        raise CommandError(errors.ZADD_NX_XX)
    if (options.gt + options.lt + options.nx) > 1:
        raise CommandError(errors.ZADD_GT_LT_NX)
    if options.incr and len(rest) > 2:
        raise CommandError(errors.ZADD_INCR_PAIRS)
    scores = [args.double(raw) for raw in rest[::2]]
    return options, list(zip(scores, rest[1::2], strict=True))


def _decide(options: AddOptions, old: float | None, score: float) -> float | None:
    """The score a member gets, None = it stays as it is.

    Raises:
        CommandError: an increment of one infinity by the other.
    """
    if old is None:
        return None if options.xx else score
    if options.nx:
        return None
    if options.incr:
        score += old
        if math.isnan(score):
            raise CommandError(errors.ZSCORE_NAN)
    if (options.lt and score >= old) or (options.gt and score <= old):
        return None
    return score


def add(ctx: Context, key: bytes, options: AddOptions, pairs: list[tuple[float, bytes]]) -> tuple[int, int, Any]:
    """Runs a ZADD; returns (added, updated, the last member's new score or None)."""
    members = read(ctx, key)
    fresh = members is None
    if members is None:
        if options.xx:
            return 0, 0, None
        members = ZSet()
    added = updated = grown = 0
    last: float | None = None
    stored: list[tuple[bytes, float]] = []
    for score, member in pairs:
        old = members.score(member)
        last = _decide(options, old, score)
        if last is None or last == old:
            continue
        added, updated = added + (old is None), updated + (old is not None)
        if members.add(member, last):
            grown += effects.MEMBER_BYTES + len(member)
        stored.append((member, last))
    if stored:
        effects.zset_added(ctx, key, members, fresh, stored, grown)
    return added, updated, last


@command("ZADD", -4, "write denyoom fast", 1, 1, 1, "sorted-set", "1.2.0", "Adds members or changes their scores.",
         "O(log(N)) for each member", keys="RW update")  # fmt: skip
def zadd(ctx: Context, argv: list[bytes]) -> Any:
    options, pairs = parse_add(argv)
    added, updated, score = add(ctx, argv[1], options, pairs)
    if options.incr:
        return score
    return added + updated if options.ch else added


@command("ZINCRBY", 4, "write denyoom fast", 1, 1, 1, "sorted-set", "1.2.0", "Adds to the score of a member.", _LOG_N,
         keys="RW access update")  # fmt: skip
def zincrby(ctx: Context, argv: list[bytes]) -> Any:
    return add(ctx, argv[1], *parse_add(argv, incr=True))[2]


@command("ZREM", -3, "write fast", 1, 1, 1, "sorted-set", "1.2.0",
         "Removes members; the last one takes the key with it.", "O(log(N)) for each member",
         keys="RW delete")  # fmt: skip
def zrem(ctx: Context, argv: list[bytes]) -> Any:
    members = read(ctx, argv[1])
    return 0 if members is None else len(remove(ctx, argv[1], members, argv[2:]))


def remove(ctx: Context, key: bytes, members: ZSet, names: list[bytes]) -> list[bytes]:
    """Removes these members and, with the last, the key; returns those that were there."""
    gone = [name for name in names if members.remove(name)]
    if gone:
        effects.zset_removed(ctx, key, members, gone)
    return gone


@command("ZSCORE", 3, "readonly fast", 1, 1, 1, "sorted-set", "1.2.0", "The score of a member.", "O(1)",
         keys="RO access")  # fmt: skip
def zscore(ctx: Context, argv: list[bytes]) -> Any:
    members = read(ctx, argv[1])
    return None if members is None else members.score(argv[2])


@command("ZMSCORE", -3, "readonly fast", 1, 1, 1, "sorted-set", "6.2.0", "The scores of several members.",
         "O(N) where N is the number of members asked for", keys="RO access")  # fmt: skip
def zmscore(ctx: Context, argv: list[bytes]) -> Any:
    members = read(ctx, argv[1])
    return [None if members is None else members.score(member) for member in argv[2:]]


@command("ZCARD", 2, "readonly fast", 1, 1, 1, "sorted-set", "1.2.0", "The number of members.", "O(1)", keys="RO")
def zcard(ctx: Context, argv: list[bytes]) -> Any:
    members = read(ctx, argv[1])
    return 0 if members is None else len(members)


def _rank(ctx: Context, argv: list[bytes], reverse: bool) -> int | None:
    members = read(ctx, argv[1])
    rank = None if members is None else members.rank(argv[2])
    if rank is None or members is None:
        return None
    return len(members) - 1 - rank if reverse else rank


@command("ZRANK", 3, "readonly fast", 1, 1, 1, "sorted-set", "2.0.0", "How many members have a lower score.", _LOG_N,
         keys="RO access")  # fmt: skip
def zrank(ctx: Context, argv: list[bytes]) -> Any:
    return _rank(ctx, argv, reverse=False)


@command("ZREVRANK", 3, "readonly fast", 1, 1, 1, "sorted-set", "2.0.0", "How many members have a higher score.",
         _LOG_N, keys="RO access")  # fmt: skip
def zrevrank(ctx: Context, argv: list[bytes]) -> Any:
    return _rank(ctx, argv, reverse=True)


@command("ZSCAN", -3, "readonly", 1, 1, 1, "sorted-set", "2.8.0", "Walks the members in steps.",
         "O(1) for every call, O(N) for a complete walk", keys="RO access")  # fmt: skip
def zscan(ctx: Context, argv: list[bytes]) -> Any:
    at = cursor(argv[2])
    members = read(ctx, argv[1])
    if members is None:
        return [b"0", []]
    pattern, count, _ = scan_options(argv[3:], with_type=False)
    following, names = ctx.server.scans.step(members, members, len(members), at, count)
    matches = args.compile_glob(pattern).fullmatch if pattern is not None else None
    found: list[bytes] = []
    for name in names:
        score = members.score(name)
        if score is not None and (matches is None or matches(name)):
            found += (name, args.format_double(score))
    return [b"%d" % following, found]
