"""KV.PREFIX.LANE: a prefix handed over as its file, to a client on the same machine that maps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pion.commands import kv
from pion.commands.export import is_loopback
from pion.commands.table import command
from pion.errors import CommandError
from pion.wire.raw import MAX_SEGMENTS, Segment, pack

if TYPE_CHECKING:
    from pion.commands.dispatch import Context


@command(
    "KV.PREFIX.LANE", -1, "readonly", 0, 0, 0, "prefix", "0.1.0",
    "Tells a client of the same machine where a prefix lies in its file, and where to get a descriptor of it.",
    "O(L) for L layers",
)  # fmt: skip
def lane(ctx: Context, argv: list[bytes]) -> Any:
    """`ns` -> socket, ticket, generation, digest, rows, and where K, V and states are; see docs/lanes.md."""
    engine = kv.engine(ctx)
    if len(argv) != 2:
        raise kv.requires("KV.PREFIX.LANE", "ns_key")
    ns = kv.namespace(ctx, argv[1], bounded=False)
    if not ctx.server.lane:
        raise CommandError(f"ERR KV.PREFIX.LANE: this server hands out no files ({ctx.server.no_lane})")
    unix = getattr(ctx.options, "unixsocket", "")
    if not (is_loopback(ctx.conn.peer) or (unix and ctx.conn.laddr == unix)):
        raise CommandError("ERR KV.PREFIX.LANE: only a client on the server's machine can map a file there")
    return _checked(ctx, ns) if engine.lane_must_wait(ns) else _told(ctx, engine.lane(ns))


async def _checked(ctx: Context, ns: bytes) -> Any:
    """The first use after a start: headers are read and checksums compared in a thread."""
    await ctx.in_thread(ctx.engine.load, ns)
    await ctx.in_thread(ctx.engine.v_prepare, ns + b"_pk")
    return _told(ctx, await ctx.in_thread(ctx.engine.lane, ns))


def _told(ctx: Context, offer: Any) -> dict[bytes, Any]:
    out: dict[bytes, Any] = {
        b"socket": ctx.server.lane.encode("utf-8", "surrogateescape"),
        b"ticket": offer.ticket,
        b"generation": f"{offer.generation:016x}".encode(),
        b"digest": None if offer.digest is None else offer.digest.encode(),
        b"rows": offer.rows,
        b"heads": offer.heads,
    }
    if offer.contents.told is None:
        offer.contents.told = _told_contents(offer.contents)
    out[b"keys"], out[b"values"], out[b"states"] = offer.contents.told
    return out


def _told_contents(contents: Any) -> tuple[list[bytes], list[bytes], list[int]]:
    keys, values = (
        [part for layer in side for part in (_described(layer.stored), layer.packed_pieces())]
        for side in contents.sides
    )
    return keys, values, [number for state in contents.states for number in state]


def _described(stored: Any) -> bytes:
    """The header that FMT RAW would put in front of these rows."""
    if len(stored.runs) > MAX_SEGMENTS:
        raise CommandError(f"ERR KV.PREFIX.LANE: a layer is {len(stored.runs)} runs, {MAX_SEGMENTS} can be told of")
    return pack(stored.dim, stored.start, stored.rows, stored.theta, [Segment(*run) for run in stored.runs])
