"""Raw commands as the published client offers them: ``pc.resp.call(...)`` answers the bytes of the reply."""

from __future__ import annotations

from typing import Any

from pion.client.connection import Flight, Steps, raise_first
from pion.client.pool import Pool
from pion.wire.resp import Err, Part, ReplyError, Simple, encode

__all__ = ["RawCommands"]


class RawCommands:
    """Any command, over the connections of a `PionPromptCache`.

    Args:
        pool: where the connections come from; they must speak RESP2.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def call(self, *parts: Part) -> bytes:
        """Send one command and return its whole reply in RESP2, an error reply too: ``b"+OK\\r\\n"``."""
        return encode(_wire(self._pool.run(_one(parts), self._pool.address.timeout)), 2)

    def call_array(self, *parts: Part) -> list[Any]:
        """Send one command whose reply is an array; its items are bytes, str, int, None or lists.

        Raises:
            CommandError: an error reply.
            TypeError: the reply is no array.
        """
        reply = self._pool.run(_one(parts), self._pool.address.timeout)
        raise_first([reply])
        if not isinstance(reply, list):
            raise TypeError(f"{parts[0]!r} answered {type(reply).__name__}, not an array")
        return reply


def _one(parts: tuple[Part, ...]) -> Steps[Any]:
    (reply,) = yield Flight([parts])
    return reply


def _wire(value: Any) -> Any:
    """A parsed RESP2 reply as a value the encoder writes the same way."""
    if isinstance(value, ReplyError):
        return Err(str(value))
    if isinstance(value, str):
        return Simple(value)
    return [_wire(item) for item in value] if isinstance(value, list) else value
