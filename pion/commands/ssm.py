"""SSM.PREFIX.*: opaque recurrent state, part of the entry of its prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pion.commands import args, kv, table
from pion.commands.table import command
from pion.errors import CommandError
from pion.wire.resp import OK

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

_BLOB: Final = 3
_MAX_LAYER: Final = (1 << 16) - 1  # the record header's field


def _layer(raw: bytes) -> int:
    layer = args.integer(raw)
    if layer < 0:
        raise CommandError("ERR invalid layer_id (must be >= 0)")
    return layer


def _digest(options: list[bytes]) -> str | None:
    if not options:
        return None
    if len(options) != 2 or args.upper(options[0]) != b"DIGEST":
        raise CommandError("ERR SSM.PREFIX.STORE: unknown option (expected DIGEST hex)")
    return kv.digest(options[1])


@command(
    "SSM.PREFIX.STORE", -1, "write", 0, 0, 0, "state", "0.1.0",
    "Stores the recurrent state of one layer.", "O(N) for N bytes", stream_arg=_BLOB,
)  # fmt: skip
def store(ctx: Context, argv: list[Any]) -> Any:
    """`sid layer blob [DIGEST hex]`: replaces the state that was there; with DIGEST a MISMATCH unless the prefix has
    it."""
    if len(argv) <= _BLOB:
        raise kv.requires("SSM.PREFIX.STORE", "session_id layer_id state_blob")
    layer = _layer(argv[2])
    if layer > _MAX_LAYER:
        raise CommandError("ERR SSM.PREFIX.STORE failed (alloc or worker bound)")
    blob, options = argv[_BLOB], argv[_BLOB + 1 :]
    streamed = not isinstance(blob, bytes | bytearray | memoryview)
    try:
        digest = _digest(options)
    except CommandError:
        if streamed:
            ctx.engine.v_store_abort(blob)
        raise
    if streamed:
        ctx.engine.ssm_store_finish(blob, digest)
    else:
        ctx.engine.ssm_store(argv[1], layer, blob, digest)
    return kv.acknowledged(ctx, OK)


def _open_stream(ctx: Context, argv: list[bytes], nbytes: int) -> Any:
    layer = _layer(argv[2])
    if layer > _MAX_LAYER:
        raise CommandError("ERR SSM.PREFIX.STORE failed (alloc or worker bound)")
    return ctx.engine.ssm_store_open(argv[1], layer, nbytes)


table.COMMANDS[b"ssm.prefix.store"].open_stream = _open_stream


@command(
    "SSM.PREFIX.FETCH", -1, "readonly", 0, 0, 0, "state", "0.1.0",
    "Returns the recurrent state of one layer.", "O(N) for N bytes",
)  # fmt: skip
def fetch(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer` -> bulk, or nil for a layer without state."""
    if len(argv) < 3:
        raise kv.requires("SSM.PREFIX.FETCH", "session_id layer_id")
    layer = _layer(argv[2])
    return None if layer > _MAX_LAYER else ctx.engine.ssm_fetch(argv[1], layer)


@command(
    "SSM.PREFIX.DROP", -1, "write", 0, 0, 0, "state", "0.1.0",
    "Drops the recurrent state of one layer or of all.", "O(L) for L layers",
)  # fmt: skip
def drop(ctx: Context, argv: list[bytes]) -> Any:
    """`sid [layer]` -> OK, held or not."""
    if len(argv) < 2:
        raise kv.requires("SSM.PREFIX.DROP", "session_id [layer_id]")
    layer = None
    if len(argv) > 2:
        layer = args.integer(argv[2])
        if layer < 0:
            raise CommandError("ERR layer_id must be >= 0 (omit to drop all)")
    if layer is None or layer <= _MAX_LAYER:
        ctx.engine.ssm_drop(argv[1], layer)
    return kv.acknowledged(ctx, OK)
