"""Effects of commands on hashes and sorted sets: the log record, the byte count, and the key that goes when empty.

What is logged is the result (these fields now have these values), never the arguments, so that replay needs no clock
and no command.
"""

from __future__ import annotations

from typing import Any

from pion.commands.dispatch import Context

ELEMENT_BYTES = 120  # two objects and a slot of the table, besides the bytes themselves


def hash_set(
    ctx: Context, key: bytes, fields: dict[bytes, bytes], fresh: bool, pairs: list[tuple[bytes, bytes]], grown: int
) -> None:
    """Fields were set; `fresh` = the hash is not in the keyspace yet."""
    if fresh:
        ctx.ks.set_object(ctx.db, key, fields, b"hash")
    ctx.ks.log(16, ctx.db, key, pairs)
    ctx.ks.adjust(ctx.db, key, grown)


def hash_deleted(ctx: Context, key: bytes, fields: dict[bytes, bytes], gone: list[bytes], freed: int) -> None:
    """Fields were removed; the last one takes the key with it."""
    if not fields:
        ctx.ks.delete(ctx.db, key)
        return
    ctx.ks.log(17, ctx.db, key, gone)
    ctx.ks.adjust(ctx.db, key, -freed)


def zset_added(
    ctx: Context, key: bytes, members: Any, fresh: bool, stored: list[tuple[bytes, float]], added: int
) -> None:
    """Members got these scores, `added` of them new; `fresh` = the sorted set is not in the keyspace yet."""
    if fresh:
        ctx.ks.set_object(ctx.db, key, members, b"zset")
    ctx.ks.log(18, ctx.db, key, stored)


def zset_removed(ctx: Context, key: bytes, members: Any, gone: list[bytes]) -> None:
    """Members were removed; the last one takes the key with it."""
    if not len(members):
        ctx.ks.delete(ctx.db, key)
        return
    ctx.ks.log(19, ctx.db, key, gone)
