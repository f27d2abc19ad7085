"""ATTEND.PREFIX.*: attention over K/V that the server holds.

Layouts, checks and their order are those of section 5 of the wire's description. Sizes are checked here, in the plane's
thread; arrays are made and computed with in another one, unless it is less work than handing it over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion.commands import args, kv
from pion.commands import attend_args as given
from pion.commands.attention import NO_ENGINE, NO_METAL
from pion.commands.table import command
from pion.errors import AttentionMissError, CommandError
from pion.wire.resp import OK, Simple

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

_NO_D: Final = "session not found, or unsupported D"


def _answer(
    ctx: Context, argv: list[bytes], rows: int, call: Callable[[Any], Any], failed: str, suffix: int = 0
) -> Any:
    """Run a query: at once when it is small, else in a thread.

    Args:
        rows: queries for each head of K/V.
        call: takes the engine, returns the reply.
        failed: why there is no answer for what is not here.
        suffix: keys that come with the query.
    """
    attention = ctx.server.attention
    sid, layer = argv[1], int(argv[2])
    name = args.upper(argv[0]).decode()
    made = attention.made
    shape = made.shape(sid, layer) if made is not None else None
    if made is None or shape is None:
        raise CommandError(f"ERR {name} failed ({failed})")
    heads, count, dim = shape

    def compute() -> Any:
        try:
            return attention.attempt(ctx, sid, layer, call)
        except AttentionMissError:
            held = made.shape(sid, layer)
            what = f"layer {layer} is held with {held[0]} heads of {held[2]} values" if held else "it is gone"
            raise CommandError(f"ERR {name} failed ({failed}): {what}") from None
        except ValueError as error:
            raise CommandError(f"ERR {name} failed ({error})") from error

    if heads * (count + suffix) * dim * rows <= limits.ATTEND_INLINE and not attention.autowarm:
        return compute()
    return ctx.computed(compute)


@command(
    "ATTEND.PREFIX.STORE", -1, "write denyoom", 0, 0, 0, "attention", "0.1.0",
    "Holds the K/V of one layer for attention.", "O(N) for N values",
)  # fmt: skip
def store(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer H N D K V`: (H, N, D) fp32 both; replaces what was there."""
    ctx.server.attention.require(NO_ENGINE)
    if len(argv) < 8:
        raise kv.requires("ATTEND.PREFIX.STORE", "session_id layer_id H N D K_blob V_blob")
    sid, layer = argv[1], given.layer(argv[2])
    if not 1 <= len(sid) <= limits.MAX_SID:
        raise CommandError(f"ERR session_id length must be 1..{limits.MAX_SID}")
    shape = given.numbers(argv[3:6], "ERR invalid H/N/D (must be > 0)")
    heads, count, dim = shape
    text = "ERR K/V blob size mismatch (expected H*N*D*4 each)"
    for blob in argv[6:8]:
        given.size(blob, 4 * heads * count * dim, text)

    def hold() -> Any:
        try:
            ctx.server.attention.engine().store(sid, layer, given.array(argv[6], *shape), given.array(argv[7], *shape))
        except ValueError as error:
            raise CommandError(f"ERR ATTEND.PREFIX.STORE failed ({error})") from error
        return OK

    return ctx.computed(hold)


@command(
    "ATTEND.PREFIX.LOOKUP", -1, "readonly fast", 0, 0, 0, "attention", "0.1.0",
    "Tells whether the K/V of a layer are in memory.", "O(1)",
)  # fmt: skip
def lookup(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer` -> +HIT, +COLD (KV.PREFIX.WARM brings it back) or +MISS."""
    ctx.server.attention.require(NO_METAL)
    if len(argv) < 3:
        raise kv.requires("ATTEND.PREFIX.LOOKUP", "session_id layer_id")
    return Simple(ctx.server.attention.lookup(argv[1], given.layer(argv[2])).encode())


@command(
    "ATTEND.PREFIX.QUERY", -1, "readonly", 0, 0, 0, "attention", "0.1.0",
    "Computes attention over the K/V of a layer.", "O(N) for N values",
)  # fmt: skip
def query(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer H D top_k Q [fa_window] [SINKS blob] [WITHLSE]` -> out, and behind it lse for more than one query a
    head. top_k is not used: attention is over all keys."""
    ctx.server.attention.require(NO_ENGINE)
    if len(argv) < 7:
        raise kv.requires("ATTEND.PREFIX.QUERY", "session_id layer_id H D top_k Q_blob [fa_window]")
    sid, layer = argv[1], given.layer(argv[2])
    heads, dim, _ = given.numbers(argv[3:6], "ERR invalid H/D/top_k (must be > 0)")
    rows = given.rows(argv[6], heads * dim, "ERR Q blob size must be a positive multiple of H*D*4")
    rest = given.rest("ATTEND.PREFIX.QUERY", argv[7:], option=b"WITHLSE")
    given.sinks_size(rest, heads, rows)
    given.refuse_cold(ctx, sid, layer)

    def call(engine: Any) -> bytes:
        q = given.array(argv[6], heads, rows, dim)
        out, lse = engine.query(sid, layer, q, window=rest.window, sinks=given.sinks(rest, heads))
        wanted = rows > 1 or b"WITHLSE" in rest.words
        return bytes(out.tobytes() + lse.tobytes()) if wanted else bytes(out.tobytes())

    return _answer(ctx, argv, rows, call, _NO_D)


@command(
    "ATTEND.PREFIX.QUERY_FUSED", -1, "readonly", 0, 0, 0, "attention", "0.1.0",
    "Computes attention over the K/V of a layer and a suffix that comes with the query.", "O(N) for N values",
)  # fmt: skip
def query_fused(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer H_q D S_suf H_kv Q K_suf V_suf head_map [fa_window] [SINKS blob]` -> out; causal in the suffix."""
    ctx.server.attention.require(NO_METAL)
    if len(argv) < 11:
        raise kv.requires(
            "ATTEND.PREFIX.QUERY_FUSED", "session_id layer_id H_q D S_suf H_kv Q K_suf V_suf head_map [fa_window]"
        )
    sid, layer = argv[1], given.layer(argv[2])
    text = "ERR invalid H_q/D/H_kv (must be > 0) or S_suf (>= 0)"
    heads, dim, suffix, kv_heads = given.numbers(argv[3:7], text, 0)
    if not (heads and dim and kv_heads):
        raise CommandError(text)
    if heads % kv_heads:
        raise CommandError("ERR H_q must be a multiple of H_kv (GQA)")
    given.refuse_cold(ctx, sid, layer)
    q, k_suf, v_suf, heads_of = argv[7:11]
    rows = given.rows(q, heads * dim, "ERR Q blob size must be a positive multiple of H_q*D*4")
    for blob in (k_suf, v_suf):
        given.size(blob, 4 * kv_heads * suffix * dim, "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)")
    given.size(heads_of, heads, "ERR head_map size mismatch (expected H_q bytes)")
    given.check_map(heads_of, kv_heads)
    rest = given.rest("ATTEND.PREFIX.QUERY_FUSED", argv[11:])
    given.sinks_size(rest, heads, rows)

    def call(engine: Any) -> bytes:
        out = engine.query_fused(
            sid, layer, given.array(q, heads, rows, dim), given.array(k_suf, kv_heads, suffix, dim),
            given.array(v_suf, kv_heads, suffix, dim), given.head_map(heads_of, heads, kv_heads), window=rest.window,
            sinks=given.sinks(rest, heads),
        )  # fmt: skip
        return bytes(out.tobytes())

    failed = "session not found, GQA mismatch, or unsupported D"
    return _answer(ctx, argv, rows * (heads // kv_heads), call, failed, suffix)


def _with_mass(rest: given.Rest, out: Any, mass: Any) -> Any:
    return [bytes(out.tobytes()), bytes(mass.tobytes())] if b"WITHMASS" in rest.words else bytes(out.tobytes())


@command(
    "ATTEND.PREFIX.QUERY_SPARSE", -1, "readonly", 0, 0, 0, "attention", "0.1.0",
    "Computes attention over keys of the caller's choice.", "O(K) for K keys, O(N) for all N with WITHMASS",
)  # fmt: skip
def query_sparse(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer H D K_max Q indices counts [fa_window] [SINKS blob] [WITHMASS]` -> out; with WITHMASS [out, mass]."""
    ctx.server.attention.require(NO_METAL)
    if len(argv) < 9:
        raise kv.requires(
            "ATTEND.PREFIX.QUERY_SPARSE", "session_id layer_id H D K_sparse_max Q indices counts [fa_window]"
        )
    sid, layer = argv[1], given.layer(argv[2])
    heads, dim, most = given.numbers(argv[3:6], "ERR invalid H/D/K_sparse_max (must be > 0)")
    given.refuse_cold(ctx, sid, layer)
    q, indices, counts = argv[6:9]
    given.size(q, 4 * heads * dim, "ERR Q blob size must be H*D*4")
    given.size(indices, 4 * heads * most, "ERR indices blob size must be H*K_sparse_max*4")
    given.size(counts, 4 * heads, "ERR counts blob size must be H*4")
    rest = given.rest("ATTEND.PREFIX.QUERY_SPARSE", argv[9:], option=b"WITHMASS")
    given.sinks_size(rest, heads)

    def call(engine: Any) -> Any:
        import numpy as np

        out, mass = engine.query_sparse(
            sid, layer, given.array(q, heads, dim), np.frombuffer(indices, "<i4").reshape(heads, most),
            np.frombuffer(counts, "<u4"), window=rest.window, sinks=given.sinks(rest, heads),
            with_mass=b"WITHMASS" in rest.words,
        )  # fmt: skip
        return _with_mass(rest, out, mass)

    return _answer(ctx, argv, 1, call, "session not found, K_sparse_max=0, or unsupported D")


@command(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO", -1, "readonly", 0, 0, 0, "attention", "0.1.0",
    "Computes attention over the blocks that matter most to the queries.", "O(N/B + K*B) for K blocks of B",
)  # fmt: skip
def query_sparse_auto(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer H_q D B K_top H_kv Q head_map [fa_window [selector]] [SINKS blob] [WITHMASS]` -> out, or [out, mass];
    selector 0 = block mean, 1 = Quest."""
    ctx.server.attention.require(NO_ENGINE)
    if len(argv) < 10:
        raise kv.requires(
            "ATTEND.PREFIX.QUERY_SPARSE_AUTO", "session_id layer_id H_q D B K_top H_kv Q head_map [fa_window]"
        )
    return _auto(ctx, argv, argv[8], argv[9], None, argv[10:])


@command(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", -1, "readonly", 0, 0, 0, "attention", "0.1.0",
    "Does the same, and attends to a suffix that comes with the query.", "O(N/B + K*B + S) for K blocks of B",
)  # fmt: skip
def query_sparse_auto_fused(ctx: Context, argv: list[bytes]) -> Any:
    """`sid layer H_q D B K_top H_kv S_suf Q K_suf V_suf head_map [fa_window [selector]] [SINKS blob] [WITHMASS]`."""
    ctx.server.attention.require(NO_METAL)
    if len(argv) < 13:
        raise kv.requires(
            "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
            "sid layer H_q D B K_top H_kv S_suf Q K_suf V_suf head_map [fa_window]",
        )
    return _auto(ctx, argv, argv[9], argv[12], (argv[8], argv[10], argv[11]), argv[13:])


def _auto(
    ctx: Context, argv: list[bytes], q: bytes, heads_of: bytes, suffix: tuple[bytes, bytes, bytes] | None,
    after: Sequence[bytes],
) -> Any:  # fmt: skip
    """Both of them. `suffix`: S_suf, K_suf, V_suf."""
    sid, layer = argv[1], given.layer(argv[2])
    heads, dim, block, k_top, kv_heads = given.numbers(argv[3:8], "ERR invalid H_q/D/B/K_top/H_kv (must be > 0)")
    extra = args.integer(suffix[0]) if suffix is not None else 0
    if extra < 0:
        raise CommandError("ERR S_suf must be >= 0")
    if heads % kv_heads:
        raise CommandError("ERR H_q must be a multiple of H_kv (GQA)")
    given.refuse_cold(ctx, sid, layer)
    given.size(q, 4 * heads * dim, "ERR Q blob size must be H_q*D*4")
    if suffix is not None:
        for blob in suffix[1:]:
            given.size(
                blob, 4 * kv_heads * extra * dim, "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)"
            )
    if heads_of:
        given.size(heads_of, heads, "ERR head_map size must be 0 (identity) or H_q bytes")
    given.check_map(heads_of, kv_heads)
    rest = given.rest(args.upper(argv[0]).decode(), after, option=b"WITHMASS", selector=True)
    given.sinks_size(rest, heads)

    def call(engine: Any) -> Any:
        more: dict[str, Any] = {}
        if suffix is not None:
            more = {
                name: given.array(blob, kv_heads, extra, dim)
                for name, blob in zip(("k_suf", "v_suf"), suffix[1:], strict=True)
            }
        out, mass = engine.query_sparse_auto(
            sid, layer, given.array(q, heads, dim), block, k_top, kv_heads,
            given.head_map(heads_of, heads, kv_heads), **more, window=rest.window,
            selector="quest" if rest.quest else "block_mean", sinks=given.sinks(rest, heads),
            with_mass=b"WITHMASS" in rest.words,
        )  # fmt: skip
        return _with_mass(rest, out, mass)

    failed = "session not found, B=0, K_top=0, or unsupported D" if suffix is None else (
        "session not found, invalid params, or unsupported D"
    )  # fmt: skip
    return _answer(ctx, argv, heads // kv_heads, call, failed, extra)


@command(
    "ATTEND.PREFIX.DROP", -1, "write", 0, 0, 0, "attention", "0.1.0",
    "Frees the K/V that are held for sessions.", "O(N) for N sessions",
)  # fmt: skip
def drop(ctx: Context, argv: list[bytes]) -> Any:
    """`sid [sid ...]` -> how many layers were held or remembered."""
    ctx.server.attention.require(NO_METAL)
    if len(argv) < 2:
        raise kv.requires("ATTEND.PREFIX.DROP", "session_id [session_id ...]")
    made = ctx.server.attention.made
    return sum(made.drop(sid) for sid in argv[1:]) if made is not None else 0


@command(
    "ATTEND.PREFIX.INFO", -1, "readonly", 0, 0, 0, "attention", "0.1.0",
    "Returns figures of the attention engine, or the layers of a session.", "O(L) for L layers",
)  # fmt: skip
def info(ctx: Context, argv: list[bytes]) -> Any:
    """`[sid]` -> lines `name:value`. Of a session: `layer_<i>:<HIT or COLD>,heads=..,rows=..,head_dim=..`."""
    attention = ctx.server.attention
    attention.require(NO_METAL)
    if len(argv) < 2:
        return _lines(attention.described() | attention.settings())
    made = attention.made
    layers = made.layers(argv[1]) if made is not None else {}
    if not layers:
        raise CommandError("ERR session not found")
    return _lines(
        {
            f"layer_{layer}": f"{state},heads={heads},rows={rows},head_dim={dim}"
            for layer, (state, (heads, rows, dim)) in layers.items()
        }
    )


def _lines(figures: dict[str, Any]) -> str:
    return "".join(f"{name}:{value}\r\n" for name, value in figures.items())
