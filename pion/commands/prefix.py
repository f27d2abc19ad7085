"""KV.PREFIX.*: the registry of prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pion import errors, limits
from pion.commands import args, kv, schema
from pion.commands.attention import NO_METAL
from pion.commands.table import command
from pion.errors import CommandError
from pion.wire.resp import OK, Simple

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

HIT: Final = Simple(b"HIT")
MISS: Final = Simple(b"MISS")
UNKNOWN: Final = Simple(b"UNKNOWN")
MAX_TOKENS: Final = 100_000_000
LIST_COUNT: Final = 100
LIST_COUNT_MAX: Final = 10_000
_CURSOR: Final = re.compile(rb"0|[1-9][0-9]{0,19}")
_MAX_ROPE: Final = 1e15  # far beyond any model's; its powers stay finite
_OWN_NAMES: Final = (b"kv", b"blob", b"export", b"quarantine")  # of the data directory, beside pion.*
_NAME_MAX: Final = 250  # a file system's 255, less the suffix of an unfinished copy
_WORKER: Final = b"0"  # one process, one coherent keyspace: every prefix lives on worker 0


def bounded_name(what: str) -> Callable[[bytes], bytes]:
    """A parser of names of 1 to MAX_NAMESPACE bytes."""

    def parse(raw: bytes) -> bytes:
        if not 1 <= len(raw) <= limits.MAX_NAMESPACE:
            raise CommandError(f"ERR {what} length must be 1..{limits.MAX_NAMESPACE}")
        return raw

    return parse


def _number(what: str, low: int, high: int) -> Callable[[bytes], int]:
    return lambda raw: kv.bounded(raw, low, high, what)


def _rope(raw: bytes) -> float | None:
    """The base of the rotary embedding the rows were rotated with; None = not rotated."""
    if args.upper(raw) == b"NONE":
        return None
    text = f"ERR ROPE must be a base from 1 to {_MAX_ROPE:g}, or NONE"
    theta = args.double(raw, text)
    if not 1 <= theta <= _MAX_ROPE:
        raise CommandError(text)
    return theta


# Options with one value: word -> (argument of Engine.register, parser)
_VALUED: Final[dict[bytes, tuple[str, Callable[[bytes], Any]]]] = {
    b"PREFILL_MS": ("prefill_ms", kv.prefill_ms),
    b"ROWS": ("rows", _number("ROWS", 1, limits.MAX_ROWS)),
    b"LAYERS": ("layers", _number("LAYERS", 0, limits.MAX_LAYERS)),
    b"STATES": ("states", _number("STATES", 0, limits.MAX_STATES)),
    b"DIGEST": ("digest", kv.digest),
    b"SCOPE": ("scope", bounded_name("SCOPE")),
    b"PARENT": ("parent", bounded_name("PARENT")),
    b"HEADS": ("heads", _number("HEADS", 1, limits.MAX_DIM)),
    b"HEAD_DIM": ("head_dim", _number("HEAD_DIM", 1, limits.MAX_DIM)),
    b"ROPE": ("rope", _rope),
}
_REGISTER_OPTIONS: Final = ", ".join(["BLOCKS", *[word.decode() for word in _VALUED], "REPLACE"])


def _blocks(argv: list[bytes]) -> tuple[int, bytes]:
    """`block_size hash_count hash_blob`: u64 little-endian hashes in token order."""
    if len(argv) < 3:
        raise CommandError("ERR BLOCKS requires: block_size hash_count hash_blob")
    size = kv.bounded(argv[0], 1, limits.MAX_BLOCK_SIZE, "BLOCKS block_size")
    count = kv.bounded(argv[1], 0, limits.MAX_BLOCK_HASHES, "BLOCKS hash_count")
    if len(argv[2]) != 8 * count:
        raise CommandError("ERR BLOCKS hash_blob length mismatch")
    return size, argv[2]


def _register_options(command: str, argv: list[bytes]) -> dict[str, Any]:
    """The options, in any order; the last of a repeated one wins."""
    out: dict[str, Any] = {}
    i = 0
    while i < len(argv):
        word = args.upper(argv[i])
        if word == b"REPLACE":
            out["replace"] = True
            i += 1
        elif word == b"BLOCKS":
            out["blocks"] = _blocks(argv[i + 1 : i + 4])
            i += 4
        elif word not in _VALUED:
            raise CommandError(f"ERR {command} unknown option '{args.text(argv[i][:64])}' ({_REGISTER_OPTIONS})")
        elif i + 1 == len(argv):
            raise CommandError(f"ERR {command} option {word.decode()} needs a value")
        else:
            name, parse = _VALUED[word]
            out[name] = parse(argv[i + 1])
            i += 2
    return out


def _check_shape(ctx: Context, ns: bytes, dims: set[int], options: dict[str, Any]) -> None:
    if ("rows" in options) != ("layers" in options):
        raise CommandError("ERR ROWS and LAYERS are declared together")
    if options.get("layers") == 0 and not options.get("states"):
        raise CommandError(f"ERR LAYERS out of range (1..{limits.MAX_LAYERS}; 0 with STATES)")
    heads, head_dim = options.get("heads"), options.get("head_dim")
    known = heads or head_dim
    if known and any(dim % known or (heads and head_dim and heads * head_dim != dim) for dim in dims):
        raise CommandError("ERR HEADS * HEAD_DIM must equal kv_dim")
    if "parent" in options:
        kv.namespace(ctx, options["parent"])


@command(
    "KV.PREFIX.REGISTER", -1, "write denyoom", 0, 0, 0, "prefix", "0.1.0",
    "Makes room for the K/V of a prefix: dimension, format and what is known of it.",
    "O(1), O(N log N) for N block hashes",
)  # fmt: skip
def register(ctx: Context, argv: list[bytes]) -> Any:
    """`ns kv_dim vquant [BLOCKS size count blob] [PREFILL_MS ms] [ROWS n] [LAYERS l] [DIGEST hex] [SCOPE s] ...`."""
    engine = kv.engine(ctx)
    if len(argv) < 4:
        raise kv.requires("KV.PREFIX.REGISTER", "ns_key kv_dim vquant")
    ns = kv.namespace(ctx, argv[1])
    kv_dim = args.integer(argv[2])
    if not 1 <= kv_dim <= limits.MAX_DIM:
        raise CommandError("ERR kv_dim out of range")
    unknown = CommandError(f"ERR KV.PREFIX.REGISTER: unknown vquant '{args.text(argv[3][:64])}' {kv.ACCEPTED_FORMATS}")
    code = kv.stored_format("KV.PREFIX.REGISTER", args.text(argv[3]).lower(), unknown)
    options = _register_options("KV.PREFIX.REGISTER", argv[4:])
    _check_shape(ctx, ns, {kv_dim}, options)
    engine.register(ns, kv_dim, code, **options)
    if "replace" in options:
        ctx.server.attention.forget(ns)  # also where the description is the same: the rows will not be
    return kv.acknowledged(ctx, OK)


@command(
    "KV.PREFIX.REGISTER.SCHEMA", -1, "write denyoom", 0, 0, 0, "prefix", "0.1.0",
    "Makes room for the K/V of a prefix whose layers, or whose K and V, differ in dimension or format.",
    "O(L) for L layers, O(N log N) for N block hashes",
)  # fmt: skip
def register_schema(ctx: Context, argv: list[bytes]) -> Any:
    """`ns n kspec ... vspec ... [options of REGISTER]`; a spec is `fmt=f,dim=d[,rope=r]`, with `*m` for m layers."""
    engine = kv.engine(ctx)
    if len(argv) < 4:
        raise kv.requires("KV.PREFIX.REGISTER.SCHEMA", "ns_key N kspec_0 ... kspec_{N-1} vspec_0 ... vspec_{N-1}")
    ns = kv.namespace(ctx, argv[1])
    k_layers, v_layers, rest = schema.register(argv[2:])
    options = _register_options("KV.PREFIX.REGISTER.SCHEMA", rest)
    _check_shape(ctx, ns, {dim for dim, _ in (*k_layers, *v_layers)}, options)
    if options.pop("layers", len(k_layers)) != len(k_layers):
        raise CommandError("ERR LAYERS must be the number of layers of the schema")
    engine.register_schema(ns, k_layers, v_layers, **options)
    if "replace" in options:
        ctx.server.attention.forget(ns)  # also where the description is the same: the rows will not be
    return kv.acknowledged(ctx, OK)


@command(
    "KV.PREFIX.LOOKUP", -1, "readonly fast", 0, 0, 0, "prefix", "0.1.0",
    "Tells whether the K/V of a prefix is here, and credits the hit.", "O(1)",
)  # fmt: skip
def lookup(ctx: Context, argv: list[bytes]) -> Any:
    """`ns [TOKENS n] [PREFILL_MS ms] [DIGEST hex]` -> +HIT or +MISS; a refused option records nothing."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) < 2:
        raise kv.requires("KV.PREFIX.LOOKUP", "ns_key")
    ns = kv.namespace(ctx, argv[1], bounded=False)
    options: dict[str, Any] = {}
    for i in range(2, len(argv), 2):
        if i + 1 == len(argv):
            raise CommandError("ERR KV.PREFIX.LOOKUP option needs a value")
        word = args.upper(argv[i])
        if word == b"TOKENS":
            options["tokens"] = kv.bounded(argv[i + 1], 0, MAX_TOKENS, "TOKENS")
        elif word == b"PREFILL_MS":
            options["prefill_ms"] = kv.prefill_ms(argv[i + 1])
        elif word == b"DIGEST":
            options["digest"] = kv.digest(argv[i + 1])
        else:
            raise CommandError("ERR KV.PREFIX.LOOKUP unknown option (TOKENS, PREFILL_MS)")
    if engine.must_load(ns):
        return _loaded_lookup(ctx, ns, options)
    return HIT if engine.lookup(ns, **options) else MISS


async def _loaded_lookup(ctx: Context, ns: bytes, options: dict[str, Any]) -> Any:
    """The first lookup after a start reads the headers of the file, which may be on a slow disk."""
    await ctx.in_thread(ctx.engine.load, ns)
    return HIT if ctx.engine.lookup(ns, **options) else MISS


@command(
    "KV.PREFIX.DROP", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Drops prefixes: keys, values and recurrent state together.", "O(N) for N names",
)  # fmt: skip
def drop(ctx: Context, argv: list[bytes]) -> Any:
    """`ns [ns ...]` -> how many of them were held. No name is dropped when one of them is not allowed."""
    engine = kv.engine(ctx, hint=False)
    if len(argv) < 2:
        raise kv.requires("KV.PREFIX.DROP", "ns_key [ns_key ...]")
    names = [kv.namespace(ctx, raw, bounded=False) for raw in argv[1:]]
    dropped = int(engine.drop(*names))
    ctx.server.attention.forget(*names)
    return kv.acknowledged(ctx, dropped)


@command(
    "KV.PREFIX.OWNER", -1, "readonly fast", 0, 0, 0, "prefix", "0.1.0",
    "Names the worker that holds a prefix; -1 when none does.", "O(1)",
)  # fmt: skip
def owner(ctx: Context, argv: list[bytes]) -> Any:
    """`ns` -> +0, or +-1 for an unknown one."""
    engine = kv.engine(ctx)
    if len(argv) < 2:
        raise kv.requires("KV.PREFIX.OWNER", "ns_key")
    return Simple(_WORKER if engine.owner(kv.namespace(ctx, argv[1], bounded=False)) >= 0 else b"-1")


@command(
    "KV.PREFIX.BLOCKS", -1, "readonly", 0, 0, 0, "prefix", "0.1.0",
    "Returns the block hash table of a prefix.", "O(N) for N hashes",
)  # fmt: skip
def blocks(ctx: Context, argv: list[bytes]) -> Any:
    """`ns` -> u32 block_size, u32 count, u64 hashes; +UNKNOWN without a table."""
    engine = kv.engine(ctx)
    if len(argv) < 2:
        raise kv.requires("KV.PREFIX.BLOCKS", "ns_key")
    table = engine.blocks(kv.namespace(ctx, argv[1]))
    return UNKNOWN if table is None else table


@command(
    "KV.PREFIX.MEMBERSHIP", -1, "readonly fast", 0, 0, 0, "prefix", "0.1.0",
    "Tells which of the given block hashes a prefix has.", "O(K) for K probes",
    fast="MEMBERSHIP",
)  # fmt: skip
def membership(ctx: Context, argv: list[bytes]) -> Any:
    """`ns hash_count hash_blob` -> bitmap, bit i (least significant first) for probe i; +UNKNOWN without a table."""
    engine = kv.engine(ctx)
    if len(argv) < 4:
        raise kv.requires("KV.PREFIX.MEMBERSHIP", "ns_key hash_count hash_blob")
    ns = kv.namespace(ctx, argv[1])
    count = kv.bounded(argv[2], 0, limits.MAX_BLOCK_HASHES, "hash_count")
    if len(argv[3]) != 8 * count:
        raise CommandError("ERR hash_blob length mismatch")
    if count > limits.MEMBERSHIP_INLINE:
        return _membership_in_thread(ctx, ns, argv[3])
    bitmap = engine.membership(ns, argv[3])
    return UNKNOWN if bitmap is None else bitmap


async def _membership_in_thread(ctx: Context, ns: bytes, blob: bytes) -> Any:
    bitmap = await ctx.in_thread(ctx.engine.membership, ns, blob)
    return UNKNOWN if bitmap is None else bitmap


@command(
    "KV.PREFIX.SAVE", -1, "admin", 0, 0, 0, "prefix", "0.1.0",
    "Makes everything durable; with a path, writes a self-contained copy there.", "O(N) for N dirty bytes",
)  # fmt: skip
async def save(ctx: Context, argv: list[bytes]) -> Any:
    """`[path]`: relative to the data directory."""
    engine = kv.engine(ctx)
    path = _relative_path(argv[1]) if len(argv) > 1 else None
    await ctx.in_thread(engine.save, path)
    return OK


def _relative_path(raw: bytes) -> str:
    parts = raw.split(b"/")
    if not raw or raw[:1] in b"/~" or b".." in parts or any(byte < 0x20 or byte == 0x7F for byte in raw):
        raise CommandError(
            "ERR KV.PREFIX.SAVE: path must be relative to the data directory "
            "(no leading '/', no '..', no control bytes)"
        )
    first = parts[0]
    if first in (b".", b"", *_OWN_NAMES) or first.startswith(b"pion."):
        raise CommandError(f"ERR KV.PREFIX.SAVE: '{args.text(first)}' is a name the data directory uses itself")
    if any(len(part) > _NAME_MAX for part in parts):
        raise CommandError(f"ERR KV.PREFIX.SAVE: a name in the path is longer than {_NAME_MAX} bytes")
    return args.text(raw)


@command(
    "KV.PREFIX.COMMIT", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Answers once everything acknowledged before it is on stable storage.", "O(N) for N dirty bytes",
)  # fmt: skip
def commit(ctx: Context, argv: list[bytes]) -> Any:
    """Survives power loss once it answered."""
    kv.engine(ctx, hint=False)
    return ctx.server.commit.later(ctx, OK)


@command(
    "KV.PREFIX.WHY", -1, "readonly fast", 0, 0, 0, "prefix", "0.1.0",
    "Says why a lookup of the namespace is a hit or a miss.", "O(1)",
)  # fmt: skip
def why(ctx: Context, argv: list[bytes]) -> Any:
    """`ns` -> a line that starts with hit, never, dropped, evicted, expired or incomplete."""
    engine = kv.engine(ctx)
    if len(argv) < 2:
        raise kv.requires("KV.PREFIX.WHY", "ns_key")
    return engine.why(kv.namespace(ctx, argv[1]))


@command(
    "KV.PREFIX.LIST", -1, "readonly", 0, 0, 0, "prefix", "0.1.0",
    "Walks the registered namespaces.", "O(COUNT) per call",
)  # fmt: skip
def list_(ctx: Context, argv: list[bytes]) -> Any:
    """`[SCOPE s] [MATCH pattern] [COUNT n] [CURSOR] c` -> [next cursor, names]; cursor 0 starts and ends the walk."""
    engine = kv.engine(ctx)
    scope: bytes | None = None
    match: bytes | None = None
    count, cursor, i = LIST_COUNT, 0, 1
    while i < len(argv):
        word = args.upper(argv[i])
        if i + 1 == len(argv):
            if word in (b"SCOPE", b"MATCH", b"COUNT", b"CURSOR"):
                raise CommandError("ERR KV.PREFIX.LIST option needs a value")
            cursor = _cursor(argv[i])
            break
        value = argv[i + 1]
        if word == b"SCOPE":
            scope = value
        elif word == b"MATCH":
            match = value
        elif word == b"COUNT":
            count = args.integer(value)
            if count < 1:
                raise CommandError(errors.SYNTAX)
        elif word == b"CURSOR":
            cursor = _cursor(value)
        else:
            raise CommandError("ERR KV.PREFIX.LIST unknown option (SCOPE, MATCH, COUNT, CURSOR)")
        i += 2
    after, names = engine.list(scope, match, cursor, min(count, LIST_COUNT_MAX))
    return [b"%d" % after, list(names)]


def _cursor(raw: bytes) -> int:
    if not _CURSOR.fullmatch(raw) or int(raw) >= 1 << 64:
        raise CommandError(errors.INVALID_CURSOR)
    return int(raw)


@command(
    "KV.PREFIX.FLUSH", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Drops every prefix.", "O(N) for N prefixes",
)  # fmt: skip
def flush(ctx: Context, argv: list[bytes]) -> Any:
    """-> how many namespaces were dropped."""
    dropped = int(kv.engine(ctx).flush())
    ctx.server.attention.forget_all()
    return kv.acknowledged(ctx, dropped)


@command(
    "KV.PREFIX.WARM", -1, "write", 0, 0, 0, "prefix", "0.1.0",
    "Loads a prefix into the attention engine.", "O(N) for N rows",
)  # fmt: skip
def warm(ctx: Context, argv: list[bytes]) -> Any:
    """`ns H D [sid [DIGEST hex]]` -> +layers, and ` skipped_dim=k` behind it when k layers are not D wide by a whole
    number.

    H is the number of heads of K and V; where H * D is not what is stored, as many heads of D as are there. With DIGEST
    a MISMATCH when something else is stored.
    """
    kv.engine(ctx)
    if len(argv) < 4:
        raise kv.requires("KV.PREFIX.WARM", "ns_key H D")
    ns = kv.namespace(ctx, argv[1])
    heads, dim = args.integer(argv[2]), args.integer(argv[3])
    if not (1 <= heads <= limits.ATTEND_MAX_HEADS and 1 <= dim <= limits.ATTEND_MAX_HEAD_DIM):
        raise CommandError(f"ERR invalid H/D (1..{limits.ATTEND_MAX_HEADS} / 1..{limits.ATTEND_MAX_HEAD_DIM})")
    ctx.server.attention.require(NO_METAL)
    if not all(ctx.engine.v_exists(ns + side) for side in (b"_pk", b"_pv")):
        raise CommandError("ERR KV.PREFIX.WARM namespace not registered (call KV.PREFIX.REGISTER first)")
    sid = argv[4] if len(argv) > 4 and argv[4] else ns
    if len(argv) > 5 and (len(argv) != 7 or args.upper(argv[5]) != b"DIGEST"):
        raise CommandError("ERR KV.PREFIX.WARM: unknown option (expected DIGEST hex behind the session)")
    digest = kv.digest(argv[6]) if len(argv) > 5 else None
    if len(sid) > limits.MAX_SID:
        raise CommandError(f"ERR session_id length must be 1..{limits.MAX_SID}")

    def load() -> Any:
        layers, skipped = ctx.server.attention.warm(ctx.engine, ns, heads, dim, sid, digest)
        return Simple(b"%d skipped_dim=%d" % (layers, skipped) if skipped else b"%d" % layers)

    return ctx.computed(load)
