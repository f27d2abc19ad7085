"""V.EXPORT: rows handed over as a file, to a client on the same machine."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion.commands import args, kv
from pion.commands.table import command
from pion.errors import CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

_NUMBERS: Final = ("n_layers", "n_kv_heads", "head_dim")
_MOST: Final = (limits.MAX_LAYERS, limits.MAX_DIM, limits.MAX_DIM)


@command(
    "V.EXPORT", -1, "readonly", 0, 0, 0, "vstore", "0.1.0",
    "Writes rows of K and V to a file on the server's machine and returns its path.", "O(N) for N rows",
)  # fmt: skip
def export(ctx: Context, argv: list[bytes]) -> Any:
    """`k_sid v_sid start end n_layers n_kv_heads head_dim` -> absolute path of a safetensors file."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) < 8:
        raise kv.requires("V.EXPORT", "k_session_id v_session_id start end n_layers n_kv_heads head_dim")
    unix = getattr(ctx.options, "unixsocket", "")
    if not (is_loopback(ctx.conn.peer) or (unix and ctx.conn.laddr == unix)):
        raise CommandError("ERR V.EXPORT: only a client on the server's machine can open a file there")
    k_sid, v_sid = argv[1], argv[2]
    for sid in (k_sid, v_sid):
        kv.namespace(ctx, sid, bounded=False)
        if not engine.v_exists(sid):
            raise CommandError("ERR session not found")
    start, end = args.integer(argv[3]), args.integer(argv[4])
    if start < 0 or end <= start:
        raise CommandError("ERR V.EXPORT invalid range: end must exceed start (>=0)")
    if end > limits.MAX_ROWS:
        raise CommandError(f"ERR V.EXPORT: a session has at most {limits.MAX_ROWS} rows")
    shape = [kv.bounded(raw, 1, most, name) for raw, most, name in zip(argv[5:8], _MOST, _NUMBERS, strict=True)]
    return _path(ctx, k_sid, v_sid, start, end, *shape)


async def _path(ctx: Context, *request: Any) -> bytes:
    path: str = await ctx.in_thread(ctx.engine.v_export, *request)
    return path.encode("utf-8", "surrogateescape")


def is_loopback(peer: str) -> bool:
    """Whether an address, as CLIENT LIST shows it, is of this machine."""
    if peer == "memory":  # a connection inside this process
        return True
    try:
        address = ipaddress.ip_address(peer.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
