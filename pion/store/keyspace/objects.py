"""Hashes and sorted sets as effects: what a log record does to one, and the records that build one anew.

This module is the `codec` of the keyspace and its log.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from pion._core.items import HDEL, HSET, ZADD, ZREM, unpack_items
from pion.store.keyspace.zset import ZSet

ELEMENT_BYTES = 120  # two objects and a slot of the table, besides the bytes themselves
ITEMS_PER_RECORD = 1000

Hash = dict[bytes, bytes]


def apply(kind: int, obj: Hash | ZSet | None, payload: bytes) -> Hash | ZSet:
    """The object after an effect, changed in place; a new one where there was none."""
    items = unpack_items(kind, payload)
    if kind in (HSET, HDEL):
        fields: Hash = obj if isinstance(obj, dict) else {}
        if kind == HSET:
            fields.update(items)
        else:
            for field in items:
                fields.pop(field, None)
        return fields
    members = obj if isinstance(obj, ZSet) else ZSet()
    if kind == ZADD:
        for member, score in items:
            members.add(member, score)
    elif kind == ZREM:
        for member in items:
            members.remove(member)
    return members


def dump(obj: Hash | ZSet) -> Iterator[tuple[int, list[Any]]]:
    """(kind, items) effects that build the object."""
    kind = HSET if isinstance(obj, dict) else ZADD
    items = iter(list(obj.items()))
    while part := list(islice(items, ITEMS_PER_RECORD)):
        yield kind, part


def measure(obj: Hash | ZSet) -> int:
    """Memory of an object, as `used_bytes` counts it."""
    if isinstance(obj, dict):
        return sum(len(field) + len(value) + ELEMENT_BYTES for field, value in obj.items())
    return sum(len(member) + 2 * ELEMENT_BYTES for member in obj)
