"""What a client call can raise besides the refusals of ``pion.errors``, and how an error reply becomes an exception."""

from typing import Final

from pion.errors import (
    AuthenticationError,
    CommandError,
    MismatchError,
    OutOfMemoryError,
    PionError,
    StorageError,
)

__all__ = [
    "AttendError",
    "CallTimeoutError",
    "ConnectionLostError",
    "IncompleteError",
    "LaneError",
    "PrefixMissError",
    "reply_error",
]


class AttendError(CommandError, RuntimeError):
    """The server refused, or could not answer, a question of ``attend_*``; the text names the command."""


class ConnectionLostError(PionError, ConnectionError):
    """The server cannot be reached, or hung up in the middle of a call. Whether the call took effect is unknown."""


class CallTimeoutError(PionError, TimeoutError):
    """Nothing moved for the timeout. The connection was closed; whether the call took effect is unknown."""


class IncompleteError(PionError):
    """A fetch answered fewer rows, layers or bytes than the prefix has. Nothing of it may be used: recompute."""


class LaneError(PionError):
    """The way of getting bytes that was asked for (``PION_LANE``, ``Client.map``) cannot be used; the text says why."""


class PrefixMissError(PionError, LookupError):
    """The prefix is not there, or not complete; the text says why."""


_BY_CODE: Final[dict[str, type[CommandError]]] = {
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
    "NOPERM": AuthenticationError,
    "MISMATCH": MismatchError,
    "OOM": OutOfMemoryError,
    "MISCONF": StorageError,
}


def reply_error(text: str) -> CommandError:
    """The exception for an error reply, by its first word; ``str()`` of it begins with the whole line."""
    kind = _BY_CODE.get(text.partition(" ")[0], CommandError)
    if text.startswith("NOAUTH"):
        text = f"{text} (the server wants a password: pion://:password@host or password=)"
    elif text.startswith("ERR V-store not enabled") and "--kvcache" not in text:
        text = f"{text} (start the server with --kvcache)"
    return kind(text)
