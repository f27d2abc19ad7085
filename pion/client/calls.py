"""What each client method sends and makes of the answer: the part the sync and the trio client share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from pion.client.connection import Command, Flight, Steps, expect_ok, raise_first
from pion.client.errors import reply_error
from pion.errors import utf8
from pion.wire.resp import Part, ReplyError

__all__ = ["abandon", "call", "commit", "drop", "lookup", "pipeline", "save", "stats"]

_SECONDS: Final = ("prefill_seconds_avoided", "prefill_seconds_avoided_measured")


def abandon(namespace: str | bytes, digest: str) -> Steps[None]:
    """Drop what a store left behind that broke off: a prefix that is not complete and has this digest."""
    yield Flight([["KV.PREFIX.ABANDON", namespace, digest]])


def call(parts: Command, out: Sequence[Any] | None) -> Steps[Any]:
    """One command; an error reply raises."""
    (reply,) = yield Flight([parts], {0: out} if out is not None else {})
    raise_first([reply])
    return reply


def pipeline(commands: Iterable[Command], raise_on_error: bool) -> Steps[list[Any]]:
    """Many commands, their replies in order; errors as exceptions in the list, or the first one raised."""
    replies = yield Flight(commands)
    if raise_on_error:
        raise_first(replies)
    return [reply_error(str(reply)) if isinstance(reply, ReplyError) else reply for reply in replies]


def lookup(command: Command) -> Steps[bool]:
    """A LOOKUP."""
    reply = yield from call(command, None)
    return bool(reply == "HIT")


def drop(names: Sequence[str | bytes]) -> Steps[int]:
    """Drop prefixes; how many were held."""
    if not names:
        return 0
    sent = [utf8(name, "the namespace") if isinstance(name, str) else name for name in names]
    reply = yield from call(["KV.PREFIX.DROP", *sent], None)
    return int(reply)


def commit() -> Steps[None]:
    """Wait until everything acknowledged is on stable storage."""
    (reply,) = yield Flight([["KV.PREFIX.COMMIT"]])
    expect_ok(reply, "KV.PREFIX.COMMIT")


def save(path: str | None) -> Steps[None]:
    """Checkpoint, or write a self-contained copy."""
    command: list[Part] = ["KV.PREFIX.SAVE"]
    (reply,) = yield Flight([command if path is None else [*command, path]])
    expect_ok(reply, "KV.PREFIX.SAVE")


def stats() -> Steps[dict[str, int | float]]:
    """The figures of PION.STATS."""
    reply = yield from call(["PION.STATS"], None)
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    figures: dict[str, int | float] = {}
    for key, value in pairs:
        name = key.decode()
        figures[name] = float(value) if name in _SECONDS else int(value)
    return figures
