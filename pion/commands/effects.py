"""Effects of commands on hashes and sorted sets: the log record, the byte count, and the key that goes when empty.

What is logged is the result (these fields now have these values), never the arguments, so that replay needs no clock
and no command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pion.store.keyspace.zset import ZSet

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

ELEMENT_BYTES: Final = 120  # two small objects and a slot of the table, besides the bytes themselves
MEMBER_BYTES: Final = 180  # a score, a slot of the table and a place in the order

# Kinds of log records.
_HSET, _HDEL, _ZADD, _ZREM = 16, 17, 18, 19

Hash = dict[bytes, bytes]


def hash_set(
    ctx: Context, key: bytes, fields: Hash, fresh: bool, pairs: Sequence[tuple[bytes, bytes]], grown: int
) -> None:
    """Fields were set, `grown` bytes more in all; `fresh` = the hash is not in the keyspace yet."""
    if fresh:
        ctx.ks.set_object(ctx.db, key, fields, b"hash", grown)
    else:
        ctx.ks.adjust(ctx.db, key, grown)
    ctx.ks.log(_HSET, ctx.db, key, pairs)


def hash_deleted(ctx: Context, key: bytes, fields: Hash, gone: list[bytes], freed: int) -> None:
    """Fields were removed; the last one takes the key with it."""
    if not fields:
        ctx.ks.delete(ctx.db, key)
        return
    ctx.ks.log(_HDEL, ctx.db, key, gone)
    ctx.ks.adjust(ctx.db, key, -freed)


def zset_added(
    ctx: Context, key: bytes, members: ZSet, fresh: bool, stored: list[tuple[bytes, float]], grown: int
) -> None:
    """Members got these scores, `grown` bytes more in all; `fresh` = the sorted set is not in the keyspace yet."""
    if fresh:
        ctx.ks.set_object(ctx.db, key, members, b"zset", grown)
    else:
        ctx.ks.adjust(ctx.db, key, grown)
    ctx.ks.log(_ZADD, ctx.db, key, stored)


def zset_removed(ctx: Context, key: bytes, members: ZSet, gone: list[bytes]) -> None:
    """Members were removed; the last one takes the key with it."""
    if not len(members):
        ctx.ks.delete(ctx.db, key)
        return
    ctx.ks.log(_ZREM, ctx.db, key, gone)
    ctx.ks.adjust(ctx.db, key, -sum(MEMBER_BYTES + len(member) for member in gone))


def put_copy(ctx: Context, db: int, key: bytes, value: Any, nbytes: int) -> None:
    """Puts a copy of a hash or sorted set at a free key."""
    if isinstance(value, ZSet):
        ctx.ks.set_object(db, key, ZSet(value.items()), b"zset", nbytes)
        ctx.ks.log(_ZADD, db, key, list(value.items()))
    else:
        ctx.ks.set_object(db, key, dict(value), b"hash", nbytes)
        ctx.ks.log(_HSET, db, key, list(value.items()))
