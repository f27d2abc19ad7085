"""Every error that crosses the wire, once. No imports.

A handler or the store raises `CommandError` (or a subclass); the dispatcher answers its text as a RESP error and the
connection lives on. The text starts with the code clients switch on (`ERR`, `WRONGTYPE`, ...), without the leading
`-`. Texts of ordinary commands are Redis 7's, word for word: clients match on them.
"""

from typing import Final


class PionError(Exception):
    """Base of everything Pion raises on purpose."""


class ArgumentError(PionError, ValueError):
    """A str that cannot be sent, because UTF-8 has no bytes for it."""


def utf8(text: str, what: str) -> bytes:
    """The bytes of a str argument.

    Args:
        what: its name, for the error.

    Raises:
        ArgumentError: it holds half of a surrogate pair, as names of files and cut JSON may.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        place = f"the lone surrogate {text[error.start]!r} at position {error.start}"
        raise ArgumentError(f"{what} has no UTF-8: {place} of {text[:80]!r}; give bytes, or other text") from None


class CommandError(PionError):
    """A command that is refused; `str(error)` is the whole wire text without the leading `-`."""

    @property
    def code(self) -> str:
        """The first word of the text: what clients switch on."""
        return str(self).split(" ", 1)[0]


class WrongTypeError(CommandError):
    """The key holds a value of another type."""

    def __init__(self, text: str = "WRONGTYPE Operation against a key holding the wrong kind of value") -> None:
        super().__init__(text)


class AuthenticationError(CommandError):
    """NOAUTH or WRONGPASS: log in, or log in with other credentials."""


class OutOfMemoryError(CommandError):
    """The server is above its `maxmemory`: delete something or raise the limit."""

    def __init__(self, text: str = "OOM command not allowed when used memory > 'maxmemory'.") -> None:
        super().__init__(text)


class MismatchError(CommandError):
    """A stored prefix belongs to other tokens, another model, format or shape (`MISMATCH ...`)."""


class StorageError(CommandError):
    """A write or flush failed: what the command would have acknowledged is not kept."""


class ColdMissError(CommandError):
    """The K/V of a layer went for others: KV.PREFIX.WARM brings them back."""

    def __init__(self, text: str = "COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)") -> None:
        super().__init__(text)


class AttentionMissError(CommandError):
    """No K/V of this shape is held for the session and layer."""

    def __init__(self, text: str = "ERR session not found") -> None:
        super().__init__(text)


class TicketError(PionError):
    """A ticket of KV.PREFIX.LANE that is unknown, used, too old, or for an entry that is gone."""


class StartupError(PionError):
    """The server cannot start as asked; the command line prints `FATAL: <text>` and exits with 1."""


# --- shared -------------------------------------------------------------------------------------------------------
SYNTAX: Final = "ERR syntax error"
NOT_INTEGER: Final = "ERR value is not an integer or out of range"
NOT_INT32: Final = "ERR value is out of range, value must between -2147483648 and 2147483647"
NOT_INT63: Final = "ERR value is out of range, value must between -9223372036854775807 and 9223372036854775807"
OUT_OF_RANGE: Final = "ERR value is out of range"
NOT_POSITIVE: Final = "ERR value is out of range, must be positive"
NOT_FLOAT: Final = "ERR value is not a valid float"
NO_SUCH_KEY: Final = "ERR no such key"
INVALID_CURSOR: Final = "ERR invalid cursor"
SAME_OBJECT: Final = "ERR source and destination objects are the same"
INTERNAL: Final = "ERR internal error"
NOT_IN_VERSION: Final = "not in this version"

# --- connection ---------------------------------------------------------------------------------------------------
NOAUTH: Final = "NOAUTH Authentication required."
WRONGPASS: Final = "WRONGPASS invalid username-password pair or user is disabled."
HELLO_NOAUTH: Final = (
    "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> "
    "<pass> option can be used to authenticate the client and select the RESP protocol version at the same time"
)
AUTH_NO_PASSWORD: Final = (
    "ERR AUTH <password> called without any password configured for the default user. Are you sure your "
    "configuration is correct?"
)
NOPROTO: Final = "NOPROTO unsupported protocol version"
BAD_PROTO: Final = "ERR Protocol version is not an integer or out of range"
DB_INDEX: Final = "ERR DB index is out of range"
CLIENT_NAME: Final = "ERR Client names cannot contain spaces, newlines or special characters."
NO_SUCH_CLIENT: Final = "ERR No such client"
MAXCLIENTS: Final = "ERR max number of clients reached"

# --- strings ------------------------------------------------------------------------------------------------------
INCR_OVERFLOW: Final = "ERR increment or decrement would overflow"
DECR_OVERFLOW: Final = "ERR decrement would overflow"
NAN_OR_INFINITY: Final = "ERR value is NaN or Infinity"
INCR_NAN: Final = "ERR increment would produce NaN or Infinity"
STRING_TOO_LONG: Final = "ERR string exceeds maximum allowed size (proto-max-bulk-len)"
OFFSET_RANGE: Final = "ERR offset is out of range"

# --- keys ---------------------------------------------------------------------------------------------------------
EXPIRE_NX_CLASH: Final = "ERR NX and XX, GT or LT options at the same time are not compatible"
EXPIRE_GT_LT: Final = "ERR GT and LT options at the same time are not compatible"

# --- hashes -------------------------------------------------------------------------------------------------------
HASH_NOT_INTEGER: Final = "ERR hash value is not an integer"
HASH_NOT_FLOAT: Final = "ERR hash value is not a float"

# --- sorted sets --------------------------------------------------------------------------------------------------
ZADD_NX_XX: Final = "ERR XX and NX options at the same time are not compatible"
ZADD_GT_LT_NX: Final = "ERR GT, LT, and/or NX options at the same time are not compatible"
ZADD_INCR_PAIRS: Final = "ERR INCR option supports a single increment-element pair"
ZSCORE_NAN: Final = "ERR resulting score is not a number (NaN)"
ZRANGE_MINMAX: Final = "ERR min or max is not a float"
ZRANGE_LEX_RANGE: Final = "ERR min or max not valid string range item"
ZRANGE_LIMIT: Final = "ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX"
ZRANGE_LEX_SCORES: Final = "ERR syntax error, WITHSCORES not supported in combination with BYLEX"

# --- server -------------------------------------------------------------------------------------------------------
NOTHING_KEPT: Final = "ERR the ordinary keyspace is not kept on disk (--memory-only or --no-wal)"
SAVE_FAILED: Final = "ERR the log could not be flushed: what was acknowledged may not survive a power loss"
NO_LFU: Final = (
    "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note that when switching "
    "between policies at runtime LRU and LFU data will take some time to adjust."
)
MISCONF_LOG: Final = "MISCONF Errors writing to the log: {reason}"
CONFIG_UNKNOWN: Final = "ERR Unknown option or number of arguments for CONFIG SET - '{name}'"
CONFIG_FAILED: Final = "ERR CONFIG SET failed (possibly related to argument '{name}') - {reason}"
DEBUG_REFUSED: Final = "ERR DEBUG command not allowed."
NO_SHUTDOWN: Final = "ERR No shutdown in progress."


def wrong_arity(fullname: str) -> CommandError:
    """The error for a wrong number of arguments; `fullname` is `get` or `client|kill`."""
    return CommandError(f"ERR wrong number of arguments for '{fullname}' command")


def unknown_command(argv: "list[bytes]") -> CommandError:
    """Redis 7's text: the name and up to 128 bytes of arguments, line breaks as spaces."""
    shown = b""
    for arg in argv[1:]:
        if len(shown) >= 128:
            break
        shown += b"'%s' " % _clean(arg, 128 - len(shown))
    return CommandError(
        f"ERR unknown command '{_printable(argv[0], 128)}', with args beginning with: "
        + shown.decode("utf-8", "surrogateescape")
    )


def unknown_subcommand(container: str, name: bytes) -> CommandError:
    """Redis 7's text for an unknown subcommand: clients in "auto" modes fall back on it."""
    return CommandError(f"ERR unknown subcommand '{_printable(name, 128)}'. Try {container.upper()} HELP.")


def bad_subcommand(container: str, name: str) -> CommandError:
    """Redis's text for a known subcommand with arguments it does not know."""
    return CommandError(
        f"ERR unknown subcommand or wrong number of arguments for '{name.upper()}'. Try {container.upper()} HELP."
    )


def expire_time(command: str) -> CommandError:
    """A TTL that is zero, negative or past the end of time; `command` is the lower-case name."""
    return CommandError(f"ERR invalid expire time in '{command}' command")


def _printable(raw: bytes, limit: int) -> str:
    """`_clean` as text; bytes that are no UTF-8 survive the way back into the reply."""
    return _clean(raw, limit).decode("utf-8", "surrogateescape")


def _clean(raw: bytes, limit: int) -> bytes:
    """At most `limit` bytes up to the first NUL, as C's %.*s; a line break cannot end the error line early."""
    text = bytes(raw[:limit]).split(b"\0", 1)[0]
    return text.replace(b"\r", b" ").replace(b"\n", b" ")
