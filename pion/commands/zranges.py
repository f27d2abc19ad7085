"""Ranges of sorted sets: by rank, by score, by name, read or removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pion import errors
from pion.commands import args
from pion.commands.dispatch import Context
from pion.commands.table import command
from pion.commands.zsets import read, remove
from pion.errors import CommandError
from pion.store.keyspace.zset import ZSet

Scored = list[tuple[float, bytes]]

_KINDS = {b"BYSCORE": "score", b"BYLEX": "name"}
_RANGE = "O(log(N)+M) where N is the number of members and M the length of the answer"


@dataclass(slots=True)
class Bound:
    """One end of a score or name range; `value` None = open to infinity (names only)."""

    value: Any
    open: bool = False


def score_bound(raw: bytes) -> Bound:
    """`1.5`, `(1.5`, `-inf`, `+inf`; no digits at all are 0, as C's strtod has it."""
    is_open = raw[:1] == b"("
    return Bound(args.double(raw[is_open:].lstrip() or b"0", errors.ZRANGE_MINMAX), is_open)


def name_bound(raw: bytes) -> tuple[bytes, bytes]:
    """`[a`, `(a`, `-`, `+` as (kind, name)."""
    if raw in (b"-", b"+"):
        return raw, b""
    if raw[:1] in (b"[", b"("):
        return raw[:1], raw[1:]
    raise CommandError(errors.ZRANGE_LEX_RANGE)


def by_rank(members: ZSet, start: int, stop: int, reverse: bool) -> Scored:
    """Members at the ranks [start, stop], negative from the end."""
    size = len(members)
    start = max(0, start + size if start < 0 else start)
    stop = min(size - 1, stop + size if stop < 0 else stop)
    if start > stop:
        return []
    if reverse:
        return members.slice(size - 1 - stop, size - start)[::-1]
    return members.slice(start, stop + 1)


def score_ranks(members: ZSet, low: Bound, high: Bound) -> tuple[int, int]:
    """The ranks [first, last) whose scores lie in the range."""
    first = members.first_rank(low.value, after=low.open)
    last = members.first_rank(high.value, after=not high.open)
    return first, max(first, last)


def name_ranks(members: ZSet, low: tuple[bytes, bytes], high: tuple[bytes, bytes]) -> tuple[int, int]:
    """The ranks [first, last) whose names lie in the range; meant for members of one score, as in Redis."""

    def rank(kind: bytes, name: bytes, upper: bool) -> int:
        if kind in (b"-", b"+"):
            return 0 if kind == b"-" else len(members)
        return members.first_name_rank(name, after=(kind == b"[") == upper)

    first = rank(*low, upper=False)
    return first, max(first, rank(*high, upper=True))


def _limited(members: ZSet, ranks: tuple[int, int], reverse: bool, offset: int, count: int) -> Scored:
    """The part of a range that LIMIT leaves; a negative offset leaves nothing, a negative count everything."""
    first, last = ranks
    if offset < 0 or offset >= last - first:
        return []
    size = last - first - offset if count < 0 else min(count, last - first - offset)
    if reverse:
        return members.slice(last - offset - size, last - offset)[::-1]
    return members.slice(first + offset, first + offset + size)


def _answer(ctx: Context, found: Scored, with_scores: bool) -> list[Any]:
    if not with_scores:
        return [member for _, member in found]
    if ctx.conn.proto == 3:
        return [[member, score] for score, member in found]
    return [item for score, member in found for item in (member, score)]


def _range(ctx: Context, argv: list[bytes], kind: str = "auto", reverse: bool | None = None) -> list[Any]:
    """ZRANGE and its older relatives.

    Args:
        kind: `rank`, `score`, `name`, or `auto` when BYSCORE and BYLEX may say it.
        reverse: None when REV may say it.
    """
    with_scores, offset, count = False, 0, -1
    free_kind, free_direction = kind == "auto", reverse is None
    kind, reverse = ("rank" if free_kind else kind), bool(reverse)
    i = 4
    while i < len(argv):
        option = args.upper(argv[i])
        if option == b"WITHSCORES":
            with_scores = True
        elif option == b"LIMIT" and i + 2 < len(argv):
            offset, count = args.integer(argv[i + 1]), args.integer(argv[i + 2])
            i += 2
        elif option == b"REV" and free_direction:
            reverse, free_direction = True, False
        elif option in _KINDS and free_kind:
            kind, free_kind = _KINDS[option], False
        else:
            raise CommandError(errors.SYNTAX)
        i += 1
    if count != -1 and kind == "rank":
        raise CommandError(errors.ZRANGE_LIMIT)
    if with_scores and kind == "name":
        raise CommandError(errors.ZRANGE_LEX_SCORES)
    low, high = (argv[3], argv[2]) if reverse and kind != "rank" else (argv[2], argv[3])
    if kind == "rank":
        start, stop = args.integer(low), args.integer(high)
        members = read(ctx, argv[1])
        found = by_rank(members, start, stop, reverse) if members is not None else []
        return _answer(ctx, found, with_scores)
    if kind == "score":
        bounds = score_bound(low), score_bound(high)
        members = read(ctx, argv[1])
        ranks = score_ranks(members, *bounds) if members is not None else (0, 0)
    else:
        names = name_bound(low), name_bound(high)
        members = read(ctx, argv[1])
        ranks = name_ranks(members, *names) if members is not None else (0, 0)
    return _answer(ctx, _limited(members, ranks, reverse, offset, count), with_scores) if members is not None else []


@command("ZRANGE", -4, "readonly", 1, 1, 1, "sorted-set", "1.2.0", "Members of a range of ranks, scores or names.",
         _RANGE, keys="RO access")  # fmt: skip
def zrange(ctx: Context, argv: list[bytes]) -> Any:
    return _range(ctx, argv)


@command("ZREVRANGE", -4, "readonly", 1, 1, 1, "sorted-set", "1.2.0", "Members of a range of ranks, highest first.",
         _RANGE, keys="RO access")  # fmt: skip
def zrevrange(ctx: Context, argv: list[bytes]) -> Any:
    return _range(ctx, argv, "rank", True)


@command("ZRANGEBYSCORE", -4, "readonly", 1, 1, 1, "sorted-set", "1.0.5", "Members of a range of scores.", _RANGE,
         keys="RO access")  # fmt: skip
def zrangebyscore(ctx: Context, argv: list[bytes]) -> Any:
    return _range(ctx, argv, "score", False)


@command("ZREVRANGEBYSCORE", -4, "readonly", 1, 1, 1, "sorted-set", "2.2.0",
         "Members of a range of scores, highest first.", _RANGE, keys="RO access")  # fmt: skip
def zrevrangebyscore(ctx: Context, argv: list[bytes]) -> Any:
    return _range(ctx, argv, "score", True)


@command("ZRANGEBYLEX", -4, "readonly", 1, 1, 1, "sorted-set", "2.8.9", "Members of a range of names.", _RANGE,
         keys="RO access")  # fmt: skip
def zrangebylex(ctx: Context, argv: list[bytes]) -> Any:
    return _range(ctx, argv, "name", False)


@command("ZREVRANGEBYLEX", -4, "readonly", 1, 1, 1, "sorted-set", "2.8.9",
         "Members of a range of names, last first.", _RANGE, keys="RO access")  # fmt: skip
def zrevrangebylex(ctx: Context, argv: list[bytes]) -> Any:
    return _range(ctx, argv, "name", True)


@command("ZCOUNT", 4, "readonly fast", 1, 1, 1, "sorted-set", "2.0.0", "The number of members in a range of scores.",
         "O(log(N)) where N is the number of members", keys="RO access")  # fmt: skip
def zcount(ctx: Context, argv: list[bytes]) -> Any:
    bounds = score_bound(argv[2]), score_bound(argv[3])
    members = read(ctx, argv[1])
    if members is None:
        return 0
    first, last = score_ranks(members, *bounds)
    return last - first


@command("ZLEXCOUNT", 4, "readonly fast", 1, 1, 1, "sorted-set", "2.8.9", "The number of members in a range of names.",
         "O(log(N)) where N is the number of members", keys="RO access")  # fmt: skip
def zlexcount(ctx: Context, argv: list[bytes]) -> Any:
    names = name_bound(argv[2]), name_bound(argv[3])
    members = read(ctx, argv[1])
    if members is None:
        return 0
    first, last = name_ranks(members, *names)
    return last - first


def _remove(ctx: Context, key: bytes, members: ZSet | None, ranks: tuple[int, int]) -> int:
    if members is None:
        return 0
    return len(remove(ctx, key, members, [member for _, member in members.slice(*ranks)]))


@command("ZREMRANGEBYRANK", 4, "write", 1, 1, 1, "sorted-set", "2.0.0", "Removes the members in a range of ranks.",
         _RANGE, keys="RW delete")  # fmt: skip
def zremrangebyrank(ctx: Context, argv: list[bytes]) -> Any:
    start, stop = args.integer(argv[2]), args.integer(argv[3])
    members = read(ctx, argv[1])
    found = by_rank(members, start, stop, False) if members is not None else []
    return len(remove(ctx, argv[1], members, [member for _, member in found])) if members is not None else 0


@command("ZREMRANGEBYSCORE", 4, "write", 1, 1, 1, "sorted-set", "1.2.0", "Removes the members in a range of scores.",
         _RANGE, keys="RW delete")  # fmt: skip
def zremrangebyscore(ctx: Context, argv: list[bytes]) -> Any:
    bounds = score_bound(argv[2]), score_bound(argv[3])
    members = read(ctx, argv[1])
    return _remove(ctx, argv[1], members, score_ranks(members, *bounds) if members is not None else (0, 0))


@command("ZREMRANGEBYLEX", 4, "write", 1, 1, 1, "sorted-set", "2.8.9", "Removes the members in a range of names.",
         _RANGE, keys="RW delete")  # fmt: skip
def zremrangebylex(ctx: Context, argv: list[bytes]) -> Any:
    names = name_bound(argv[2]), name_bound(argv[3])
    members = read(ctx, argv[1])
    return _remove(ctx, argv[1], members, name_ranks(members, *names) if members is not None else (0, 0))


def _pop(ctx: Context, argv: list[bytes], highest: bool) -> list[Any]:
    if len(argv) > 3:
        raise CommandError(errors.SYNTAX)
    count = args.integer_in(argv[2], 0, args.INT64_MAX, errors.NOT_POSITIVE) if len(argv) == 3 else 1
    members = read(ctx, argv[1])
    if members is None or count == 0:
        return []
    found = by_rank(members, 0, count - 1, highest)
    remove(ctx, argv[1], members, [member for _, member in found])
    if len(argv) == 3 and ctx.conn.proto == 3:
        return [[member, score] for score, member in found]
    return [item for score, member in found for item in (member, score)]


@command("ZPOPMIN", -2, "write fast", 1, 1, 1, "sorted-set", "5.0.0", "Removes and answers the lowest members.",
         "O(log(N)*M) for M members", keys="RW access delete")  # fmt: skip
def zpopmin(ctx: Context, argv: list[bytes]) -> Any:
    return _pop(ctx, argv, highest=False)


@command("ZPOPMAX", -2, "write fast", 1, 1, 1, "sorted-set", "5.0.0", "Removes and answers the highest members.",
         "O(log(N)*M) for M members", keys="RW access delete")  # fmt: skip
def zpopmax(ctx: Context, argv: list[bytes]) -> Any:
    return _pop(ctx, argv, highest=True)
