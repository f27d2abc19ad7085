"""What "the same reply" means for two servers, command by command."""

from __future__ import annotations

from typing import Any

from tests.support.replies import Error, Items

_UNORDERED = {b"KEYS", b"HKEYS", b"HVALS"}
_MAPS = {b"HGETALL"}
_SCANS = {b"SCAN", b"HSCAN", b"ZSCAN"}
_SECONDS = {b"TTL", b"EXPIRETIME"}
_MILLISECONDS = {b"PTTL", b"PEXPIRETIME"}


def pairs(flat: list[Any]) -> list[Any]:
    return sorted(zip(flat[::2], flat[1::2], strict=True), key=repr)


def numbers(reply: Any) -> Any:
    """Scores as numbers: Redis 7.0 prints 17 digits where later versions print the shortest text."""
    if isinstance(reply, list):
        return [numbers(item) for item in reply]
    if isinstance(reply, bytes):
        try:
            return float(reply)
        except ValueError:
            return reply
    return reply


def normal(argv: list[bytes], reply: Any) -> Any:
    """The reply without what two right servers may answer differently."""
    name = argv[0].upper()
    if isinstance(reply, Error):
        return reply
    if name in _UNORDERED:
        return sorted(reply)
    if name in _MAPS:
        return pairs(list(reply.items)) if isinstance(reply, Items) else pairs(reply)
    if name in _SCANS:
        if argv[1 if name == b"SCAN" else 2] != b"0":
            return "a step in the middle of a walk"
        cursor, found = reply
        found = numbers(found) if name == b"ZSCAN" else found
        return [cursor, sorted(found) if name == b"SCAN" else pairs(found)]
    if name.startswith(b"Z"):
        return numbers(reply)
    return reply


def same(argv: list[bytes], one: Any, other: Any) -> bool:
    """True when the two replies to `argv` agree."""
    name = argv[0].upper()
    if name in _SECONDS | _MILLISECONDS and isinstance(one, int) and isinstance(other, int):
        slack = 5 if name in _SECONDS else 5000
        return one == other if min(one, other) < 0 else abs(one - other) <= slack
    return bool(normal(argv, one) == normal(argv, other)) and type(one) is type(other)
