"""CLIENT: what a client says about itself and asks about others."""

from __future__ import annotations

import time
from typing import Any

from pion import errors
from pion.commands import args
from pion.commands.connection import close, printable_name
from pion.commands.dispatch import Context
from pion.commands.table import command, container
from pion.errors import CommandError
from pion.wire.resp import OK, Verbatim

container("CLIENT", "connection", "2.4.0", "Commands about client connections.")

_TYPES = (b"normal", b"master", b"replica", b"slave", b"pubsub")
_QUIET = "noscript loading stale"


def connections(ctx: Context) -> list[Any]:
    """Every open connection, oldest first."""
    found = ctx.plane.connections if ctx.plane is not None else [ctx.conn]
    return sorted(found, key=lambda conn: conn.id)


def describe(conn: Any) -> str:
    """One line of CLIENT LIST. Sizes that only Redis's own buffers have are 0."""
    now = time.monotonic()
    pending = getattr(conn, "output_bytes", 0)
    half_read = getattr(conn, "input_bytes", 0)
    fields = {
        "id": conn.id,
        "addr": conn.peer,
        "laddr": conn.laddr,
        "fd": conn.fd,
        "name": conn.name or "",
        "age": int(now - conn.created),
        "idle": int(max(0.0, now - conn.last_active)),
        "flags": _flags(conn),
        "db": conn.db,
        "sub": 0,
        "psub": 0,
        "ssub": 0,
        "multi": -1,
        "qbuf": half_read,
        "qbuf-free": 0,
        "argv-mem": 0,
        "multi-mem": 0,
        "rbs": 0,
        "rbp": 0,
        "obl": 0,
        "oll": 0,
        "omem": pending,
        "tot-mem": pending + half_read,
        "events": "rw" if pending else "r",
        "cmd": _last_command(conn),
        "user": conn.user.name if conn.user is not None else "(superuser)",
        "redir": -1,
        "resp": conn.proto,
        "lib-name": conn.lib_name or "",
        "lib-ver": conn.lib_ver or "",
    }
    return " ".join(f"{key}={value}" for key, value in fields.items())


def _flags(conn: Any) -> str:
    out = "U" if conn.laddr.startswith("/") else ""
    out += "c" if conn.closing else ""
    out += "e" if conn.data.get("no-evict") else ""
    out += "T" if conn.data.get("no-touch") else ""
    return out or "N"


def _last_command(conn: Any) -> str:
    last = conn.last_cmd
    return (last.decode("utf-8", "replace") if isinstance(last, bytes) else last or "NULL").lower() or "NULL"


@command("CLIENT|ID", 2, _QUIET, 0, 0, 0, "connection", "5.0.0", "The number of this connection.", "O(1)")
def client_id(ctx: Context, _argv: list[bytes]) -> Any:
    return ctx.conn.id


@command("CLIENT|GETNAME", 2, _QUIET, 0, 0, 0, "connection", "2.6.9", "The name of this connection.", "O(1)")
def client_getname(ctx: Context, _argv: list[bytes]) -> Any:
    return ctx.conn.name or None


@command("CLIENT|SETNAME", 3, _QUIET, 0, 0, 0, "connection", "2.6.9", "Names this connection.", "O(1)")
def client_setname(ctx: Context, argv: list[bytes]) -> Any:
    ctx.conn.name = printable_name(argv[2], errors.CLIENT_NAME)
    return OK


@command(
    "CLIENT|SETINFO", 4, _QUIET, 0, 0, 0, "connection", "7.2.0", "Names the client library.", "O(1)"
)  # fmt: skip
def client_setinfo(ctx: Context, argv: list[bytes]) -> Any:
    option = args.upper(argv[2])
    if option not in (b"LIB-NAME", b"LIB-VER"):
        raise CommandError(f"ERR Unrecognized option '{args.text(argv[2])}'")
    shown = args.text(argv[2])
    value = printable_name(argv[3], f"ERR {shown} cannot contain spaces, newlines or special characters.")
    if option == b"LIB-NAME":
        ctx.conn.lib_name = value
    else:
        ctx.conn.lib_ver = value
    return OK


@command("CLIENT|INFO", 2, _QUIET, 0, 0, 0, "connection", "6.2.0", "Describes this connection.", "O(1)")
def client_info(ctx: Context, _argv: list[bytes]) -> Any:
    return Verbatim(describe(ctx.conn) + "\n")


@command(
    "CLIENT|LIST", -2, "admin noscript loading stale", 0, 0, 0, "connection", "2.4.0", "Lists open connections.",
    "O(N) where N is the number of connections",
)  # fmt: skip
def client_list(ctx: Context, argv: list[bytes]) -> Any:
    chosen = connections(ctx)
    if len(argv) == 4 and args.upper(argv[2]) == b"TYPE":
        if not _is_normal(argv[3]):
            chosen = []
    elif len(argv) > 3 and args.upper(argv[2]) == b"ID":
        wanted = {args.integer(raw, "ERR Invalid client ID") for raw in argv[3:]}
        chosen = [conn for conn in chosen if conn.id in wanted]
    elif len(argv) != 2:
        raise CommandError(errors.SYNTAX)
    return Verbatim("".join(describe(conn) + "\n" for conn in chosen))


def _is_normal(raw: bytes) -> bool:
    kind = bytes(raw).lower()
    if kind not in _TYPES:
        raise CommandError(f"ERR Unknown client type '{args.text(raw)}'")
    return kind == b"normal"


@command(
    "CLIENT|KILL", -3, "admin noscript loading stale", 0, 0, 0, "connection", "2.4.0", "Closes connections.",
    "O(N) where N is the number of connections",
)  # fmt: skip
def client_kill(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) == 3:
        address = args.text(argv[2])
        victims = [conn for conn in connections(ctx) if conn.peer == address]
        if not victims:
            raise CommandError(errors.NO_SUCH_CLIENT)
        _kill(ctx, victims[:1])
        return OK
    chosen, skip_me = connections(ctx), True
    if len(argv) % 2:
        raise CommandError(errors.SYNTAX)
    for name, raw in zip(argv[2::2], argv[3::2], strict=True):
        option, value = args.upper(name), args.text(raw)
        if option == b"ID":
            ident = args.integer_in(raw, 1, args.INT64_MAX, "ERR client-id should be greater than 0")
            chosen = [conn for conn in chosen if conn.id == ident]
        elif option == b"ADDR":
            chosen = [conn for conn in chosen if conn.peer == value]
        elif option == b"LADDR":
            chosen = [conn for conn in chosen if conn.laddr == value]
        elif option == b"TYPE":
            chosen = chosen if _is_normal(raw) else []
        elif option == b"USER":
            if value != ctx.auth.default.name:
                raise CommandError(f"ERR No such user '{value}'")
            chosen = [conn for conn in chosen if conn.user is not None and conn.user.name == value]
        elif option == b"MAXAGE":
            age = args.integer_in(raw, 1, args.INT64_MAX, "ERR maxage is not an integer or out of range")
            chosen = [conn for conn in chosen if time.monotonic() - conn.created >= age]
        elif option == b"SKIPME" and args.upper(raw) in (b"YES", b"NO"):
            skip_me = args.upper(raw) == b"YES"
        else:
            raise CommandError(errors.SYNTAX)
    if skip_me:
        chosen = [conn for conn in chosen if conn is not ctx.conn]
    _kill(ctx, chosen)
    return len(chosen)


def _kill(ctx: Context, victims: list[Any]) -> None:
    for conn in victims:
        close(ctx, conn, after_flush=conn is ctx.conn)


@command("CLIENT|UNBLOCK", -3, "admin noscript loading stale", 0, 0, 0, "connection", "5.0.0",
         "Wakes a connection in a blocking command; this version has none.", "O(1)")  # fmt: skip
def client_unblock(_ctx: Context, argv: list[bytes]) -> Any:
    args.integer(argv[2])
    if len(argv) > 4 or (len(argv) == 4 and args.upper(argv[3]) not in (b"TIMEOUT", b"ERROR")):
        raise CommandError("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
    return 0


def _switch(raw: bytes) -> bool:
    option = args.upper(raw)
    if option not in (b"ON", b"OFF"):
        raise CommandError(errors.SYNTAX)
    return option == b"ON"


@command("CLIENT|NO-EVICT", 3, "admin noscript loading stale", 0, 0, 0, "connection", "7.0.0",
         "Keeps this connection when client memory is short.", "O(1)")  # fmt: skip
def client_no_evict(ctx: Context, argv: list[bytes]) -> Any:
    ctx.conn.data["no-evict"] = _switch(argv[2])
    return OK


@command("CLIENT|NO-TOUCH", 3, _QUIET, 0, 0, 0, "connection", "7.2.0",
         "Reads of this connection do not count as use of a key.", "O(1)")  # fmt: skip
def client_no_touch(ctx: Context, argv: list[bytes]) -> Any:
    ctx.conn.data["no-touch"] = _switch(argv[2])
    return OK


@command("CLIENT|REPLY", 3, _QUIET, 0, 0, 0, "connection", "3.2.0", "Turns replies on, off, or off once.", "O(1)")
def client_reply(ctx: Context, argv: list[bytes]) -> Any:
    option, conn = args.upper(argv[2]), ctx.conn
    if option == b"ON":
        conn.data["reply"] = None
        conn.fast = True
    elif option == b"OFF":
        conn.data["reply"] = "off"
        conn.fast = False
    elif option == b"SKIP":
        if conn.data.get("reply") != "off":
            conn.data["reply"] = "skip-next"
            conn.fast = False
    else:
        raise CommandError(errors.SYNTAX)
    return OK


@command("CLIENT|PAUSE", -3, "admin noscript loading stale", 0, 0, 0, "connection", "3.0.0",
         "Holds back the commands of all clients.", "O(1)")  # fmt: skip
def client_pause(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) > 4:
        raise errors.bad_subcommand("CLIENT", "PAUSE")
    mode = args.upper(argv[3]) if len(argv) == 4 else b"ALL"
    if mode not in (b"ALL", b"WRITE"):
        raise CommandError("ERR CLIENT PAUSE mode must be WRITE or ALL")
    milliseconds = args.integer(argv[2], "ERR timeout is not an integer or out of range")
    if milliseconds < 0:
        raise CommandError("ERR timeout is negative")
    ctx.server.pause(milliseconds, mode.decode().lower())
    return OK


@command("CLIENT|UNPAUSE", 2, "admin noscript loading stale", 0, 0, 0, "connection", "6.2.0", "Ends a pause.", "O(1)")
def client_unpause(ctx: Context, _argv: list[bytes]) -> Any:
    ctx.server.unpause()
    return OK


@command("CLIENT|TRACKING", -3, _QUIET, 0, 0, 0, "connection", "6.0.0",
         "Server-assisted client-side caching; this version only knows OFF.", "O(1)")  # fmt: skip
def client_tracking(_ctx: Context, argv: list[bytes]) -> Any:
    if _switch(argv[2]):
        raise CommandError("ERR CLIENT TRACKING ON is not in this version")
    return OK


@command("CLIENT|TRACKINGINFO", 2, _QUIET, 0, 0, 0, "connection", "6.2.0", "The state of client-side caching.", "O(1)")
def client_trackinginfo(_ctx: Context, _argv: list[bytes]) -> Any:
    return {"flags": {"off"}, "redirect": -1, "prefixes": []}


@command("CLIENT|GETREDIR", 2, _QUIET, 0, 0, 0, "connection", "6.0.0",
         "The connection that gets tracking messages; always -1.", "O(1)")  # fmt: skip
def client_getredir(_ctx: Context, _argv: list[bytes]) -> Any:
    return -1
