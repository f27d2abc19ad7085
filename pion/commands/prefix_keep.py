"""KV.PREFIX.ABANDON, PIN, UNPIN, EXPIRE, PERSIST, LEASE and INFO: what keeps a prefix, what ends it, what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pion import errors, limits
from pion.commands import args, kv
from pion.commands.commits import settled
from pion.commands.keys import condition
from pion.commands.table import command
from pion.errors import CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context


def _loaded(ctx: Context, names: list[bytes], act: Callable[[], Any]) -> Any:
    """Acts on prefixes whose files have been read: in a thread, when they have not been since the start."""
    waiting = [ns for ns in names if ctx.engine.must_load(ns)]
    return _load_first(ctx, waiting, act) if waiting else act()


async def _load_first(ctx: Context, names: list[bytes], act: Callable[[], Any]) -> Any:
    for ns in names:
        await ctx.in_thread(ctx.engine.load, ns)
    return await settled(act())


def _names(ctx: Context, argv: list[bytes]) -> list[bytes]:
    if len(argv) < 2:
        raise kv.requires(argv[0].decode("ascii", "replace").upper(), "ns_key [ns_key ...]")
    return [kv.namespace(ctx, raw, bounded=False) for raw in argv[1:]]


@command(
    "KV.PREFIX.ABANDON", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Drops a prefix that is not complete, if it has this digest.", "O(1)",
)  # fmt: skip
def abandon(ctx: Context, argv: list[bytes]) -> Any:
    """`ns digest` -> 1 when it was dropped: what a store that broke off has left behind, and nobody else's."""
    engine = kv.engine(ctx)
    if len(argv) != 3:
        raise kv.requires("KV.PREFIX.ABANDON", "ns_key digest")
    ns, digest = kv.namespace(ctx, argv[1], bounded=False), kv.digest(argv[2])

    def act() -> Any:
        dropped = engine.abandon(ns, digest)
        if dropped:
            ctx.server.attention.forget(ns)
        return kv.acknowledged(ctx, int(dropped))

    return _loaded(ctx, [ns], act)


@command(
    "KV.PREFIX.PIN", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Protects prefixes, and those they continue, from eviction.", "O(N) for N names",
)  # fmt: skip
def pin(ctx: Context, argv: list[bytes]) -> Any:
    """`ns [ns ...]` -> how many of them are here, and pinned now. Outlives restarts; DROP and EXPIRE still end them."""
    engine = kv.engine(ctx)
    names = _names(ctx, argv)
    return _loaded(ctx, names, lambda: kv.acknowledged(ctx, int(engine.pin(*names))))


@command(
    "KV.PREFIX.UNPIN", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Ends the protection of prefixes from eviction.", "O(N) for N names",
)  # fmt: skip
def unpin(ctx: Context, argv: list[bytes]) -> Any:
    """`ns [ns ...]` -> how many of them were pinned."""
    engine = kv.engine(ctx)
    names = _names(ctx, argv)
    return _loaded(ctx, names, lambda: kv.acknowledged(ctx, int(engine.unpin(*names))))


@command(
    "KV.PREFIX.EXPIRE", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Sets the time to live of a prefix in seconds.", "O(1)",
)  # fmt: skip
def expire(ctx: Context, argv: list[bytes]) -> Any:
    """`ns seconds [NX | XX | GT | LT]` -> 1 or 0, as EXPIRE; no more than 0 seconds drop the prefix."""
    engine = kv.engine(ctx)
    if len(argv) < 3:
        raise kv.requires("KV.PREFIX.EXPIRE", "ns_key seconds [NX|XX|GT|LT]")
    ns = kv.namespace(ctx, argv[1], bounded=False)
    words = [word.decode() for word in condition(argv[3:])]
    when = args.integer(argv[2]) * 1000 + ctx.now_ms()
    if not args.INT64_MIN <= when <= args.INT64_MAX:
        raise errors.expire_time("kv.prefix.expire")
    return _loaded(ctx, [ns], lambda: kv.acknowledged(ctx, int(engine.expire(ns, when, *words))))


@command(
    "KV.PREFIX.PERSIST", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Removes the time to live of a prefix.", "O(1)",
)  # fmt: skip
def persist(ctx: Context, argv: list[bytes]) -> Any:
    """`ns` -> 1 when it had one."""
    engine = kv.engine(ctx)
    if len(argv) < 2:
        raise kv.requires("KV.PREFIX.PERSIST", "ns_key")
    ns = kv.namespace(ctx, argv[1], bounded=False)
    return _loaded(ctx, [ns], lambda: kv.acknowledged(ctx, int(engine.persist(ns))))


@command(
    "KV.PREFIX.LEASE", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Keeps a prefix from eviction for a time, or claims the computing of a missing one.", "O(1)",
)  # fmt: skip
def lease(ctx: Context, argv: list[bytes]) -> Any:
    """`ns ms [OWNER name]` -> 1 granted, 0 when another client has claimed what is not complete; 0 ms give it back.

    The lease belongs to the connection, or to everybody who says the same name. It ends with its time, not with the
    connection.
    """
    engine = kv.engine(ctx)
    if len(argv) < 3:
        raise kv.requires("KV.PREFIX.LEASE", "ns_key ms [OWNER name]")
    ns = kv.namespace(ctx, argv[1])
    milliseconds = kv.bounded(argv[2], 0, limits.MAX_LEASE_MS, "ms")
    owner: tuple[str, Any] = ("connection", ctx.conn.id)
    if len(argv) > 3:
        if args.upper(argv[3]) != b"OWNER":
            raise CommandError(f"ERR KV.PREFIX.LEASE unknown option '{args.text(argv[3][:64])}' (OWNER)")
        if len(argv) != 5 or not 1 <= len(argv[4]) <= limits.MAX_NAMESPACE:
            raise CommandError(f"ERR KV.PREFIX.LEASE OWNER needs a name of 1..{limits.MAX_NAMESPACE} bytes")
        owner = ("name", argv[4])
    return _loaded(ctx, [ns], lambda: int(engine.lease(ns, milliseconds, owner)))


@command(
    "KV.PREFIX.INFO", -1, "readonly", 0, 0, 0, "prefix", "0.1.0",
    "Returns figures of the store of prefixes, or of one of them.", "O(1)",
)  # fmt: skip
def info(ctx: Context, argv: list[bytes]) -> Any:
    """`[ns]` -> lines `name:value`. Of a prefix: what is stored, its lineage, and what keeps or ends it (ttl in seconds
    and pttl in ms, -1 = for ever)."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) < 2:
        return _lines(engine.info() | ctx.server.attention.figures())
    ns = kv.namespace(ctx, argv[1], bounded=False)
    return _loaded(ctx, [ns], lambda: _lines(engine.about(ns)))


def _lines(figures: dict[str, Any]) -> str:
    return "".join(f"{name}:{value}\r\n" for name, value in figures.items())
