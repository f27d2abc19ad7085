"""KV.PREFIX.MATCH: stored prefixes that begin like what is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion.commands import args, kv
from pion.commands.prefix import bounded_name
from pion.commands.table import command
from pion.errors import CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

MATCH_LIMIT: Final = 16
MATCH_LIMIT_MAX: Final = 256
_scope: Final = bounded_name("SCOPE")


@command(
    "KV.PREFIX.MATCH", -1, "readonly", 0, 0, 0, "prefix", "0.1.0",
    "Finds the stored prefixes of a scope that begin with the same blocks of tokens.",
    "O(K + N) for K hashes and N answers; the first in a scope reads its block tables",
)  # fmt: skip
def match(ctx: Context, argv: list[bytes]) -> Any:
    """`scope hash_count hash_blob [LIMIT n]` -> [[ns, blocks shared, rows, digest], ...], those that share most first.

    The hashes are those of REGISTER's BLOCKS. Only complete prefixes; rows and digest are nil where not declared.
    """
    engine = kv.engine(ctx)
    if len(argv) < 4:
        raise kv.requires("KV.PREFIX.MATCH", "scope hash_count hash_blob [LIMIT n]")
    scope = _scope(argv[1])
    count = kv.bounded(argv[2], 0, limits.MAX_BLOCK_HASHES, "hash_count")
    if len(argv[3]) != 8 * count:
        raise CommandError("ERR hash_blob length mismatch")
    limit = MATCH_LIMIT
    if len(argv) > 4:
        if args.upper(argv[4]) != b"LIMIT":
            raise CommandError(f"ERR KV.PREFIX.MATCH unknown option '{args.text(argv[4][:64])}' (LIMIT)")
        if len(argv) != 6:
            raise CommandError("ERR KV.PREFIX.MATCH option LIMIT needs a value")
        limit = kv.bounded(argv[5], 1, MATCH_LIMIT_MAX, "LIMIT")
    if engine.must_match(scope):
        return _prepared_match(ctx, scope, argv[3], limit)
    return _matches(ctx, scope, argv[3], limit)


async def _prepared_match(ctx: Context, scope: bytes, hashes: bytes, limit: int) -> Any:
    """The first question after a start reads the block tables of the scope."""
    await ctx.in_thread(ctx.engine.match_prepare, scope)
    return _matches(ctx, scope, hashes, limit)


def _matches(ctx: Context, scope: bytes, hashes: bytes, limit: int) -> list[list[Any]]:
    found = ctx.engine.match(scope, hashes, limit, kv.ns_prefix(ctx))
    return [[ns, blocks, rows, digest and digest.encode()] for ns, blocks, rows, digest in found]
