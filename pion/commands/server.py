"""The server as a whole: saving, shutdown, slow log, sizes, and the probes clients send on connect."""

from __future__ import annotations

import logging
import time
from typing import Any

from pion import errors
from pion.commands import args
from pion.commands.dispatch import NO_REPLY, Context
from pion.commands.table import command, container
from pion.errors import CommandError, StorageError
from pion.wire.resp import OK, Simple

log = logging.getLogger("pion.commands")

_ADMIN = "admin noscript"
_PROBE = "noscript loading stale"


@command("TIME", 1, "loading stale fast", 0, 0, 0, "server", "2.6.0", "Seconds and microseconds of the clock.", "O(1)")
def time_(_ctx: Context, _argv: list[bytes]) -> Any:
    seconds, micro = divmod(time.time_ns() // 1000, 1_000_000)
    return [b"%d" % seconds, b"%d" % micro]


# --- saving --------------------------------------------------------------------------------------------------------


def _needs_log(ctx: Context) -> None:
    if ctx.engine.keyspace_store is None:
        raise CommandError(errors.NOTHING_KEPT)


async def _save(ctx: Context) -> None:
    """Everything acknowledged so far on stable storage.

    Raises:
        CommandError: nothing is kept on disk, or a save runs, or it failed.
    """
    state = ctx.server
    _needs_log(ctx)
    if state.saving:
        raise CommandError("ERR Background save already in progress")
    state.saving = True
    changes = ctx.ks.dirty
    try:
        await ctx.in_thread(ctx.engine.checkpoint)
    except (OSError, StorageError):
        state.last_save_ok = False
        raise StorageError(errors.SAVE_FAILED) from None
    finally:
        state.saving = False
    state.last_save, state.last_save_ok, state.saved_changes = int(time.time()), True, changes


@command("SAVE", 1, "admin noscript no_async_loading no_multi", 0, 0, 0, "server", "1.0.0",
         "Puts everything on stable storage and answers when it is there.", "O(N) for N unsaved bytes")  # fmt: skip
async def save(ctx: Context, _argv: list[bytes]) -> Any:
    await _save(ctx)
    return OK


@command("BGSAVE", -1, "admin noscript no_async_loading", 0, 0, 0, "server", "1.0.0",
         "SAVE that answers at once; LASTSAVE and INFO tell the result.", "O(1)")  # fmt: skip
def bgsave(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) > 2 or (len(argv) == 2 and args.upper(argv[1]) != b"SCHEDULE"):
        raise CommandError(errors.SYNTAX)
    _needs_log(ctx)
    if ctx.server.saving:
        raise CommandError("ERR Background save already in progress")
    if ctx.server.spawn is None:
        raise CommandError("ERR BGSAVE needs a running server")

    async def run() -> None:
        try:
            await _save(ctx)
        except CommandError as error:
            log.error("background save: %s", error)

    ctx.server.spawn(run)
    return Simple(b"Background saving started")


@command("BGREWRITEAOF", 1, "admin noscript no_async_loading", 0, 0, 0, "server", "1.0.0",
         "Rewrites the log of the ordinary keyspace, shorter, while serving.", "O(1)")  # fmt: skip
def bgrewriteaof(ctx: Context, _argv: list[bytes]) -> Any:
    _needs_log(ctx)
    if ctx.engine.keyspace_store.rewriting:
        raise CommandError("ERR Background append only file rewriting already in progress")
    ctx.engine.keyspace_store.request_rewrite()
    return Simple(b"Background append only file rewriting started")


@command("LASTSAVE", 1, "loading stale fast", 0, 0, 0, "server", "1.0.0", "Unix time of the last good save.", "O(1)",
         acl="admin dangerous")  # fmt: skip
def lastsave(ctx: Context, _argv: list[bytes]) -> Any:
    return ctx.server.last_save


@command("SHUTDOWN", -1, "admin noscript loading stale no_multi allow_busy", 0, 0, 0, "server", "1.0.0",
         "Ends the server; SAVE also writes what is not on stable storage yet.", "O(1)")  # fmt: skip
def shutdown(ctx: Context, argv: list[bytes]) -> Any:
    given = {args.upper(raw) for raw in argv[1:]}
    if given - {b"NOSAVE", b"SAVE", b"NOW", b"FORCE", b"ABORT"} or {b"NOSAVE", b"SAVE"} <= given:
        raise CommandError(errors.SYNTAX)
    if b"ABORT" in given:
        raise CommandError(errors.SYNTAX if len(given) > 1 else errors.NO_SHUTDOWN)
    if ctx.server.shut_down is None:
        raise CommandError("ERR SHUTDOWN needs a running server")
    ctx.server.shut_down(b"NOSAVE" not in given)
    return NO_REPLY


# --- slow log ------------------------------------------------------------------------------------------------------

container("SLOWLOG", "server", "2.2.12", "Commands about the log of slow commands.")


@command("SLOWLOG|GET", -2, "admin loading stale", 0, 0, 0, "server", "2.2.12", "The latest slow commands.",
         "O(N) where N is the number of entries")  # fmt: skip
def slowlog_get(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) > 3:
        raise errors.wrong_arity("slowlog|get")
    text = "ERR count should be greater than or equal to -1"
    count = args.integer_in(argv[2], -1, args.INT64_MAX, text) if len(argv) == 3 else 10
    return [
        [entry.ident, entry.at, entry.usec, entry.argv, entry.peer, entry.name]
        for entry in ctx.server.slowlog.latest(count)
    ]


@command("SLOWLOG|LEN", 2, "admin loading stale", 0, 0, 0, "server", "2.2.12", "The number of entries.", "O(1)")
def slowlog_len(ctx: Context, _argv: list[bytes]) -> Any:
    return len(ctx.server.slowlog)


@command("SLOWLOG|RESET", 2, "admin loading stale", 0, 0, 0, "server", "2.2.12", "Forgets the entries.", "O(1)")
def slowlog_reset(ctx: Context, _argv: list[bytes]) -> Any:
    ctx.server.slowlog.clear()
    return OK


# --- latency: no monitor, so nothing ever happened ------------------------------------------------------------------

container("LATENCY", "server", "2.8.13", "Commands about latency events; this server records none.")


@command("LATENCY|LATEST", 2, _ADMIN + " loading stale", 0, 0, 0, "server", "2.8.13", "The latest events.", "O(1)")
def latency_latest(_ctx: Context, _argv: list[bytes]) -> Any:
    return []


@command("LATENCY|HISTORY", 3, _ADMIN + " loading stale", 0, 0, 0, "server", "2.8.13", "Samples of an event.", "O(1)")
def latency_history(_ctx: Context, _argv: list[bytes]) -> Any:
    return []


@command("LATENCY|RESET", -2, _ADMIN + " loading stale", 0, 0, 0, "server", "2.8.13", "Forgets events.", "O(1)")
def latency_reset(_ctx: Context, _argv: list[bytes]) -> Any:
    return 0


@command(
    "LATENCY|HISTOGRAM", -2, _ADMIN + " loading stale", 0, 0, 0, "server", "7.0.0", "Latencies by command.", "O(1)"
)
def latency_histogram(_ctx: Context, _argv: list[bytes]) -> Any:
    return {}


# --- sizes and encodings -------------------------------------------------------------------------------------------

container("MEMORY", "server", "4.0.0", "Commands about memory.")
container("OBJECT", "generic", "2.2.3", "Commands about the inside of values.")


@command("MEMORY|USAGE", -3, "readonly", 2, 2, 1, "server", "4.0.0", "About how many bytes a key holds.",
         "O(1)", keys="RO")  # fmt: skip
def memory_usage(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) not in (3, 5) or (len(argv) == 5 and args.upper(argv[3]) != b"SAMPLES"):
        raise CommandError(errors.SYNTAX)
    if len(argv) == 5 and args.integer(argv[4]) < 0:
        raise CommandError(errors.SYNTAX)
    return ctx.ks.memory(ctx.db, argv[2])


_ENCODINGS = {b"string": b"raw", b"hash": b"hashtable", b"zset": b"skiplist"}


@command("OBJECT|ENCODING", 3, "readonly", 2, 2, 1, "generic", "2.2.3", "How a value is held in memory.", "O(1)",
         keys="RO")  # fmt: skip
def object_encoding(ctx: Context, argv: list[bytes]) -> Any:
    kind = ctx.ks.type(ctx.db, argv[2])
    return None if kind is None else _ENCODINGS[kind]


@command("OBJECT|REFCOUNT", 3, "readonly", 2, 2, 1, "generic", "2.2.3", "The number of references to a value.", "O(1)",
         keys="RO")  # fmt: skip
def object_refcount(ctx: Context, argv: list[bytes]) -> Any:
    return 1 if ctx.ks.exists(ctx.db, argv[2]) else None


@command("OBJECT|IDLETIME", 3, "readonly", 2, 2, 1, "generic", "2.2.3", "Seconds since a key was used.", "O(1)",
         keys="RO")  # fmt: skip
def object_idletime(ctx: Context, argv: list[bytes]) -> Any:
    return ctx.ks.idle_seconds(ctx.db, argv[2])


@command("OBJECT|FREQ", 3, "readonly", 2, 2, 1, "generic", "4.0.0", "How often a key is used; not counted here.",
         "O(1)", keys="RO")  # fmt: skip
def object_freq(ctx: Context, argv: list[bytes]) -> Any:
    if not ctx.ks.exists(ctx.db, argv[2]):
        return None
    raise CommandError(errors.NO_LFU)


# --- probes --------------------------------------------------------------------------------------------------------

container("MODULE", "server", "4.0.0", "Commands about modules; there are none to load.")
container("CLUSTER", "cluster", "3.0.0", "Commands about a cluster; this server is not part of one.")


@command("MODULE|LIST", 2, _ADMIN, 0, 0, 0, "server", "4.0.0", "The loaded modules.", "O(1)")
def module_list(_ctx: Context, _argv: list[bytes]) -> Any:
    return []


@command("CLUSTER|INFO", 2, "stale", 0, 0, 0, "cluster", "3.0.0", "The state of the cluster.", "O(1)")
def cluster_info(_ctx: Context, _argv: list[bytes]) -> Any:
    return "cluster_enabled:0\r\n"


def _no_cluster(_ctx: Context, _argv: list[bytes]) -> Any:
    raise CommandError("ERR This instance has cluster support disabled")


for _name in ("NODES", "SLOTS", "SHARDS", "MYID"):
    command(f"CLUSTER|{_name}", 2, "stale", 0, 0, 0, "cluster", "3.0.0", "Refused: no cluster.", "O(1)")(_no_cluster)


@command("ROLE", 1, "noscript loading stale fast", 0, 0, 0, "server", "2.8.12", "The role in replication.", "O(1)",
         acl="admin dangerous")  # fmt: skip
def role(_ctx: Context, _argv: list[bytes]) -> Any:
    return ["master", 0, []]


@command(
    "WAIT", 3, "noscript", 0, 0, 0, "connection", "3.0.0", "The number of replicas that have the last write.", "O(1)"
)
def wait(_ctx: Context, argv: list[bytes]) -> Any:
    args.integer(argv[1])
    if args.integer(argv[2], "ERR timeout is not an integer or out of range") < 0:
        raise CommandError("ERR timeout is negative")
    return 0


@command("DEBUG", -2, _ADMIN + " loading stale", 0, 0, 0, "server", "1.0.0", "Refused.", "O(1)")
def debug(_ctx: Context, _argv: list[bytes]) -> Any:
    raise CommandError(errors.DEBUG_REFUSED)
