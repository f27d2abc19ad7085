"""V.*: rows of K or V by session, layer and position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion._core.stream import Extents, Sink
from pion.commands import args, kv, schema, table
from pion.commands.commits import settled
from pion.commands.table import command
from pion.errors import CommandError
from pion.store import layout
from pion.wire.raw import MAX_SEGMENTS, Segment, pack
from pion.wire.resp import OK

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

_BLOB: Final = 5  # argv index of STOREBATCH's rows
_INPUT_FORMATS: Final = (b"F16", b"BF16", b"F32")
_STORE_OPTION: Final = "ERR V.STOREBATCH: unknown option (expected FMT F16)"
_DIGEST: Final = b"DIGEST"
_FETCH_FORMATS: Final = (b"NATIVE", b"RAW")


# --- V.CREATE ------------------------------------------------------------------------------------------------------


@command(
    "V.CREATE", -1, "write denyoom", 0, 0, 0, "vstore", "0.1.0",
    "Makes a session: one side (K or V) of a prefix, or rows of its own.", "O(1)",
)  # fmt: skip
def create(ctx: Context, argv: list[bytes]) -> Any:
    """`sid value_dim [VQUANT fmt]` or `sid [default_dim] SCHEMA n spec ...` -> slot index; idempotent."""
    engine = kv.engine(ctx)
    if len(argv) < 3:
        raise kv.requires(
            "V.CREATE", "session_id value_dim [VQUANT fmt] OR sid [default_dim] SCHEMA N spec_0 ... spec_{N-1}"
        )
    if args.upper(argv[2]) == b"SCHEMA":
        return _create_schema(ctx, argv[1], argv[3:], 0)
    if len(argv) > 3 and args.upper(argv[3]) == b"SCHEMA":
        return _create_schema(ctx, argv[1], argv[4:], kv.permissive_int(argv[2]))
    dim = kv.permissive_int(argv[2])
    if not 1 <= dim <= limits.MAX_DIM:
        raise CommandError(f"ERR invalid value_dim (must be 1-{limits.MAX_DIM})")
    code = limits.FORMATS["int8"]
    for i in range(3, len(argv) - 1):
        if args.upper(argv[i]) == b"VQUANT":
            code = _uniform_format(args.text(argv[i + 1]).lower())
            break
    return kv.acknowledged(ctx, engine.v_create(argv[1], dim, code))


def _uniform_format(name: str) -> int:
    if name == kv.HYBRID:
        raise CommandError(f"ERR V.CREATE: {kv.HYBRID} requires SCHEMA form with per-layer rope=N")
    unknown = CommandError(f"ERR V.CREATE: unknown VQUANT format '{name[:64]}' {kv.ACCEPTED_FORMATS}")
    return kv.stored_format("V.CREATE", name, unknown)


def _create_schema(ctx: Context, sid: bytes, argv: list[bytes], default_dim: int) -> Any:
    return kv.acknowledged(ctx, ctx.engine.v_create(sid, *schema.create(argv, default_dim)))


# --- V.STOREBATCH --------------------------------------------------------------------------------------------------


def _place(engine: Any, argv: list[bytes]) -> tuple[bytes, int, int, int]:
    """Session, layer, start and count of a STOREBATCH, checked in the published order."""
    sid = argv[1]
    if not engine.v_exists(sid):
        raise CommandError("ERR session not found")
    layer, start, count = (args.integer(raw) for raw in argv[2:5])
    if layer < 0 or start < 0 or count <= 0:
        raise CommandError("ERR invalid layer_id/start_id/count")
    if layer >= limits.MAX_LAYERS:
        raise CommandError("ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS")
    return sid, layer, start, count


def _store_options(options: list[bytes]) -> tuple[str, str | None]:
    """The format of the rows: declared, never inferred, FP32 without an option. And the digest that the prefix must
    have."""
    given = {args.upper(name): value for name, value in zip(options[::2], options[1::2], strict=False)}
    fmt = args.upper(given.get(b"FMT", b"F32"))
    if 2 * len(given) != len(options) or not given.keys() <= {b"FMT", _DIGEST} or fmt not in _INPUT_FORMATS:
        raise CommandError(_STORE_OPTION)
    return fmt.decode(), kv.digest(given[_DIGEST]) if _DIGEST in given else None


def _check_size(engine: Any, place: tuple[bytes, int, int, int], fmt: str, got: int) -> None:
    sid, layer, start, count = place
    dim, width = engine.v_dim(sid, layer), 4 if fmt == "F32" else 2
    if dim == 0:
        raise CommandError(f"ERR V.STOREBATCH: layer {layer} is not among those of the schema")
    if got != count * dim * width:
        raise CommandError(
            f"ERR V.STOREBATCH: blob size {got} != expected {count * dim * width} "
            f"(count={count} × per_layer_dim={dim} × {width})"
        )
    if start + count > limits.MAX_ROWS:
        raise CommandError("ERR V.STOREBATCH failed")


@command(
    "V.STOREBATCH", -1, "write", 0, 0, 0, "vstore", "0.1.0",
    "Stores rows of one layer.", "O(N) for N rows", stream_arg=_BLOB,
)  # fmt: skip
def storebatch(ctx: Context, argv: list[Any]) -> Any:
    """`sid layer start count rows [FMT F16|BF16|F32] [DIGEST hex]`: row-major little-endian, FP32 without FMT; with
    DIGEST a MISMATCH unless the prefix has it."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) <= _BLOB:
        raise kv.requires("V.STOREBATCH", "session_id layer_id start_id count values_blob")
    blob = argv[_BLOB]
    if not isinstance(blob, bytes | bytearray | memoryview):
        return _finish_stream(ctx, engine, argv, blob)
    place = _place(engine, argv)
    fmt, digest = _store_options(argv[_BLOB + 1 :])
    _check_size(engine, place, fmt, len(blob))
    engine.v_store(*place, blob, fmt, digest)
    return kv.acknowledged(ctx, OK)


def _finish_stream(ctx: Context, engine: Any, argv: list[Any], sink: Any) -> Any:
    """The end of a body that went straight to its file: same checks, same order, then it becomes visible."""
    try:
        place = _place(engine, argv)
        fmt, digest = _store_options(argv[_BLOB + 1 :])
        _check_size(engine, place, fmt, sink.nbytes)
    except CommandError:
        if not getattr(sink, "discards", False):
            engine.v_store_abort(sink)
        raise
    if engine.v_store_heavy(sink, fmt):
        return _finish_in_thread(ctx, sink, fmt, digest)
    engine.v_store_finish(sink, fmt, digest)
    return kv.acknowledged(ctx, OK)


async def _finish_in_thread(ctx: Context, sink: Any, fmt: str, digest: str | None) -> Any:
    await ctx.in_thread(ctx.engine.v_store_finish, sink, fmt, digest)
    return await settled(kv.acknowledged(ctx, OK))


def _open_stream(ctx: Context, argv: list[bytes], nbytes: int) -> Any:
    """Where the rows of a large STOREBATCH go; the option behind them is not known yet, only their number of bytes."""
    engine = kv.engine(ctx, hint=False)
    sid, layer, start, count = _place(engine, argv)
    dim = engine.v_dim(sid, layer)
    if nbytes not in (2 * count * dim, 4 * count * dim) or start + count > limits.MAX_ROWS:
        sink = Sink(None, 0, nbytes)
        sink.discards = True  # which refusal it gets depends on the option that is still to come
        return sink
    return engine.v_store_open(sid, layer, start, count, nbytes)


table.COMMANDS[b"v.storebatch"].open_stream = _open_stream


# --- V.FETCH -------------------------------------------------------------------------------------------------------


@command(
    "V.FETCH", -1, "readonly", 0, 0, 0, "vstore", "0.1.0",
    "Returns rows of one layer or of all layers.", "O(N) for N rows",
)  # fmt: skip
def fetch(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer tok ...`, `sid layer RANGE start end [FMT f]` or `sid BATCH start end [layers] [FMT f]`."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) < 4:
        raise kv.requires("V.FETCH", "session_id layer_id token_id [...]")
    sid = argv[1]
    if not engine.v_exists(sid):
        raise CommandError("ERR session not found")
    return _prepared(ctx, argv) if engine.v_must_wait(sid) else _fetch(engine, argv)


async def _prepared(ctx: Context, argv: list[bytes]) -> Any:
    """The first fetch after a start: checksums are compared in a thread."""
    await ctx.in_thread(ctx.engine.v_prepare, argv[1])
    return _fetch(ctx.engine, argv)


def _fetch(engine: Any, argv: list[bytes]) -> Any:
    sid = argv[1]
    if args.upper(argv[2]) == b"BATCH":
        return _fetch_batch(engine, sid, argv)
    layer = args.integer(argv[2])
    if args.upper(argv[3]) == b"RANGE":
        if len(argv) < 6:
            raise kv.requires("V.FETCH RANGE", "session_id layer_id RANGE start end")
        start, end = _span(argv[4], argv[5], "ERR invalid RANGE: end must exceed start (>=0)")
        native, stored = _fetch_format(argv[6:])
        if stored:
            return as_stored(engine.v_fetch_stored(sid, layer, start, end))
        return engine.v_fetch_range(sid, layer, start, end, native=native)
    return engine.v_fetch_ids(sid, layer, _token_ids(argv[3:]))


def _fetch_batch(engine: Any, sid: bytes, argv: list[bytes]) -> Any:
    if len(argv) < 5:
        raise kv.requires("V.FETCH BATCH", "session_id BATCH start end [num_layers]")
    start, end = _span(argv[3], argv[4], "ERR V.FETCH BATCH invalid range: end must exceed start (>=0)")
    rest, layers = argv[5:], None
    if rest and args.upper(rest[0]) != b"FMT":
        layers = args.integer(rest[0])
        rest = rest[1:]
    native, stored = _fetch_format(rest)
    held = engine.v_num_layers(sid)
    if held == 0:
        raise CommandError("ERR V.FETCH BATCH: session has no stored layers")
    # A count the session does not have is ignored: published clients then see fewer elements and ask layer by layer.
    wanted = layers if layers is not None and 0 < layers <= held else held
    if stored:
        return [as_stored(found) for found in engine.v_batch_stored(sid, start, end, wanted)]
    return engine.v_fetch_batch(sid, start, end, wanted, native=native)


def as_stored(found: Any) -> Extents | None:
    """The answer to FMT RAW: what the rows are, and their stored bytes."""
    if found is None:
        return None
    if len(found.runs) > MAX_SEGMENTS:
        raise CommandError(
            f"ERR V.FETCH: these rows are {len(found.runs)} runs, FMT RAW tells of {MAX_SEGMENTS}: ask for fewer"
        )
    segments = [Segment(*run) for run in found.runs]
    return Extents(found.segments, head=pack(found.dim, found.start, found.rows, found.theta, segments))


def _span(first: bytes, last: bytes, wrong: str) -> tuple[int, int]:
    start, end = args.integer(first), args.integer(last)
    if start < 0 or end <= start:
        raise CommandError(wrong)
    if end - start > limits.MAX_ROWS:
        raise CommandError(f"ERR V.FETCH: more than {limits.MAX_ROWS} rows asked for")
    return start, end


def _fetch_format(options: list[bytes]) -> tuple[bool, bool]:
    """(native, as stored) of a trailing `FMT f`; other trailing words are ignored, as published."""
    if not options or args.upper(options[0]) != b"FMT":
        return False, False
    word = args.upper(options[1]) if len(options) > 1 else b""
    if word not in _FETCH_FORMATS:
        raise CommandError("ERR V.FETCH: unknown FMT (expected NATIVE or RAW)")
    return word == b"NATIVE", word == b"RAW"


def _token_ids(argv: list[bytes]) -> list[int]:
    """Row positions, in request order; an empty argument ends the list, those past the cap are not looked at."""
    ids: list[int] = []
    for i, raw in enumerate(argv[: limits.MAX_FETCH_IDS + 1]):
        if args.upper(raw) == b"FMT":
            word = args.upper(argv[i + 1]) if i + 1 < len(argv) else b""
            what = word.decode() if word in _FETCH_FORMATS else "NATIVE"
            raise CommandError(f"ERR FMT {what} requires the RANGE or BATCH form")
        if not raw or i == limits.MAX_FETCH_IDS:
            break
        ids.append(args.integer(raw))
    if not ids:
        raise CommandError("ERR no token IDs provided")
    return ids


# --- V.INFO and rollback -------------------------------------------------------------------------------------------


@command(
    "V.INFO", -1, "readonly", 0, 0, 0, "vstore", "0.1.0",
    "Returns figures of the store or of one session.", "O(L) for L layers",
)  # fmt: skip
def info(ctx: Context, argv: list[bytes]) -> Any:
    """`[sid]` -> lines `name:value`."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) < 2:
        lines = ["enabled:1", *(f"{name}:{value}" for name, value in engine.v_totals().items())]
    else:
        lines = session_lines(engine.v_info(argv[1]))
    return "".join(f"{line}\r\n" for line in lines)


def session_lines(session: Any) -> list[str]:
    """The lines of V.INFO of a session."""
    uniform = session.uniform
    lines = [
        f"session_idx:{session.index}",
        f"value_dim:{session.dim}",
        f"v_format:{limits.FORMAT_NAMES[session.fmt]}",
        f"num_layers:{session.num_layers}",
        f"schema:{'uniform' if uniform else 'heterogeneous'}",
    ]
    for i, rows in enumerate(session.rows):
        lines += [f"layer_{i}_tokens:{rows}"] if rows else []
        lines += [] if uniform else _layer_lines(i, *session.layers[i])
    lines.append(f"total_tokens:{sum(session.rows)}")
    # Behind the published lines: what a client needs to make tensors of the rows, as far as REGISTER said it.
    told = {name: getattr(session.declared, name) for name in ("heads", "head_dim", "rope", "digest", "rows", "layers")}
    told["states"] = session.states or None
    return [*lines, *(f"{name}:{value}" for name, value in told.items() if value is not None)]


def _layer_lines(i: int, dim: int, fmt: int) -> list[str]:
    lines = [f"layer_{i}_dim:{dim}", f"layer_{i}_fmt:{layout.format_name(fmt)}"]
    return [*lines, f"layer_{i}_rope:{fmt >> 8}"] if layout.format_name(fmt) == kv.HYBRID else lines


@command(
    "V.SNAPSHOT", -1, "write", 0, 0, 0, "vstore", "0.1.0",
    "Remembers the lengths of a session's layers.", "O(L) for L layers",
)  # fmt: skip
def snapshot(ctx: Context, argv: list[bytes]) -> Any:
    """`sid` -> snap_id; in memory only, gone with the session or the process."""
    engine = kv.engine(ctx)
    if len(argv) < 2:
        raise kv.requires("V.SNAPSHOT", "session_id")
    return engine.v_snapshot(argv[1])


@command(
    "V.RESTORE", -1, "write", 0, 0, 0, "vstore", "0.1.0",
    "Cuts a session's layers back to a snapshot.", "O(L) for L layers",
)  # fmt: skip
def restore(ctx: Context, argv: list[bytes]) -> Any:
    """`sid snap_id`: never grows a layer; the snapshot stays valid."""
    engine = kv.engine(ctx, hint=False)
    snap = _snap_id("V.RESTORE", argv)
    engine.v_restore(argv[1], snap)
    return kv.acknowledged(ctx, OK)


@command(
    "V.COMMIT", -1, "write", 0, 0, 0, "vstore", "0.1.0",
    "Forgets a snapshot; the rows stay.", "O(1)",
)  # fmt: skip
def commit(ctx: Context, argv: list[bytes]) -> Any:
    """`sid snap_id` -> 1, or 0 for one that is not there."""
    engine = kv.engine(ctx, hint=False)
    snap = _snap_id("V.COMMIT", argv)
    return int(engine.v_commit(argv[1], snap))


def _snap_id(name: str, argv: list[bytes]) -> int:
    if len(argv) < 3:
        raise kv.requires(name, "session_id snap_id")
    snap = args.integer(argv[2])
    if snap <= 0:
        raise CommandError(f"ERR {name}: snap_id must be positive")
    return snap
