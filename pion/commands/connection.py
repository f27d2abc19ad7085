"""The connection itself: HELLO, AUTH, SELECT, PING, ECHO, QUIT, RESET. CLIENT is in `client.py`."""

from __future__ import annotations

from typing import Any

from pion import errors, limits
from pion.auth import User
from pion.commands import args
from pion.commands.dispatch import Context
from pion.commands.table import command
from pion.errors import AuthenticationError, CommandError
from pion.wire.resp import OK, Simple

REDIS_VERSION = "7.0.0"  # what the original reports; clients parse it to choose their commands
SERVER_NAME = "pion"


def printable_name(raw: bytes, error: str) -> str:
    """A client or library name: printable ASCII without blanks, as CLIENT LIST is split at blanks.

    Raises:
        CommandError: with the text `error`.
    """
    if any(not 0x21 <= byte <= 0x7E for byte in raw):
        raise CommandError(error)
    return bytes(raw).decode()


def close(ctx: Context, conn: Any, after_flush: bool = True) -> None:
    """Ends a connection; with `after_flush` its queued replies, the one of this command included, still leave."""
    if ctx.plane is not None:
        ctx.plane.close(conn, after_flush)
    else:
        conn.closing = True


def become(conn: Any, user: User) -> None:
    """Binds a login to the connection."""
    conn.user = user
    conn.authenticated = True


@command(
    "HELLO", -1, "noscript loading stale fast no_auth allow_busy", 0, 0, 0, "connection", "6.0.0",
    "Handshakes: selects the protocol, optionally logs in and names the connection.", "O(1)",
)  # fmt: skip
def hello(ctx: Context, argv: list[bytes]) -> Any:
    conn = ctx.conn
    proto = 0
    if len(argv) > 1:
        proto = args.integer(argv[1], errors.BAD_PROTO)
        if proto not in (2, 3):
            raise CommandError(errors.NOPROTO)
    login: tuple[bytes, bytes] | None = None
    name: str | None = None
    i = 2
    while i < len(argv):
        option = args.upper(argv[i])
        if option == b"AUTH" and i + 2 < len(argv):
            login = (argv[i + 1], argv[i + 2])
            i += 3
        elif option == b"SETNAME" and i + 1 < len(argv):
            name = printable_name(argv[i + 1], errors.CLIENT_NAME)
            i += 2
        else:
            raise CommandError(f"ERR Syntax error in HELLO option '{args.text(argv[i])}'")
    if login is not None:
        become(conn, ctx.auth.login(login[1], login[0]))
    if not conn.authenticated:
        raise AuthenticationError(errors.HELLO_NOAUTH)
    if name is not None:
        conn.name = name
    if proto:
        conn.proto = proto
    return {
        "server": SERVER_NAME,
        "version": REDIS_VERSION,
        "proto": conn.proto,
        "id": conn.id,
        "mode": "standalone",
        "role": "master",
        "modules": [],
    }


@command(
    "AUTH", -2, "noscript loading stale fast no_auth allow_busy", 0, 0, 0, "connection", "1.0.0",
    "Logs the connection in.", "O(1)",
)  # fmt: skip
def auth(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) > 3:
        raise CommandError(errors.SYNTAX)
    if len(argv) == 2:
        become(ctx.conn, ctx.auth.login(argv[1]))
    else:
        become(ctx.conn, ctx.auth.login(argv[2], argv[1]))
    return OK


@command(
    "PING", -1, "fast", 0, 0, 0, "connection", "1.0.0", "Answers PONG, or the given text.", "O(1)", fast="PING",
)  # fmt: skip
def ping(_ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) > 2:
        raise errors.wrong_arity("ping")
    return argv[1] if len(argv) == 2 else Simple(b"PONG")


@command("ECHO", 2, "loading stale fast", 0, 0, 0, "connection", "1.0.0", "Answers the given text.", "O(1)",
         fast="ECHO")  # fmt: skip
def echo(_ctx: Context, argv: list[bytes]) -> Any:
    return argv[1]


@command(
    "SELECT", 2, "loading stale fast", 0, 0, 0, "connection", "1.0.0", "Changes the selected database.", "O(1)",
)  # fmt: skip
def select(ctx: Context, argv: list[bytes]) -> Any:
    ctx.conn.db = database(ctx, argv[1])
    return OK


def database(ctx: Context, raw: bytes) -> int:
    """A database number.

    Raises:
        CommandError: no integer, or no such database.
    """
    index = args.integer(raw)
    if not -(1 << 31) <= index < 1 << 31:
        raise CommandError(errors.NOT_INT32)
    databases = getattr(ctx.options, "databases", limits.DATABASES)
    if not 0 <= index < databases:
        raise CommandError(errors.DB_INDEX)
    return index


@command(
    "QUIT", -1, "noscript loading stale fast no_auth allow_busy", 0, 0, 0, "connection", "1.0.0",
    "Answers OK and closes the connection.", "O(1)",
)  # fmt: skip
def quit_(ctx: Context, _argv: list[bytes]) -> Any:
    close(ctx, ctx.conn)
    return OK


@command(
    "RESET", 1, "noscript loading stale fast no_auth allow_busy", 0, 0, 0, "connection", "6.2.0",
    "Puts the connection back into the state of a new one.", "O(1)",
)  # fmt: skip
def reset(ctx: Context, _argv: list[bytes]) -> Any:
    conn = ctx.conn
    conn.data["reply"] = None
    conn.fast = True
    conn.db = 0
    conn.proto = 2
    conn.name = ""
    conn.user = None
    conn.authenticated = False
    if ctx.auth.open:
        become(conn, ctx.auth.default)
    return Simple(b"RESET")
