"""PION.STATS and the `# Pion` lines of INFO: the receipt of what the cache saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pion.commands import args
from pion.commands.table import command
from pion.wire.resp import OK

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

_WORKER: Final = 0

# Names and order are published; "=" marks what INFO shows too.
_COUNTERS: Final = ("hits", "misses", "hits_measured", "tokens_served", "bytes_served")
_OTHERS: Final = ("semantic_hits", "semantic_misses", "moe_hits", "moe_misses", "vector_queries")


def seconds(microseconds: int) -> str:
    """`S.mmm`, truncated."""
    return f"{microseconds // 1_000_000}.{microseconds // 1000 % 1000:03d}"


def figures(ledger: Any) -> dict[str, int | str]:
    """The receipt's counters by their published names, in the order of PION.STATS."""
    out: dict[str, int | str] = {f"kvprefix_{name}": getattr(ledger, name) for name in _COUNTERS}
    out["kvprefix_prefill_us_saved"] = ledger.prefill_us_saved
    out["kvprefix_prefill_us_measured"] = ledger.prefill_us_measured
    out["prefill_seconds_avoided"] = seconds(ledger.prefill_us_saved)
    out["prefill_seconds_avoided_measured"] = seconds(ledger.prefill_us_measured)
    out.update({name: getattr(ledger, name) for name in _OTHERS})
    return out


def info_lines(engine: Any) -> list[tuple[str, int | str]]:
    """The lines of INFO's `# Pion` section."""
    shown = figures(engine.ledger)
    del shown["kvprefix_prefill_us_saved"], shown["kvprefix_prefill_us_measured"]
    return [("stats_scope", "worker"), ("worker_id", _WORKER), *shown.items()]


@command(
    "PION.STATS", -1, "readonly", 0, 0, 0, "pion", "0.1.0",
    "Returns what the prefix cache saved, or zeroes the counters (RESET).", "O(1)",
)  # fmt: skip
def stats(ctx: Context, argv: list[bytes]) -> Any:
    """`[RESET]` -> a map of 16 fields; any other argument is ignored."""
    ledger = ctx.engine.ledger
    if len(argv) > 1 and args.upper(argv[1]) == b"RESET":
        ledger.reset()
        return OK
    return {"worker_id": _WORKER, "uptime_in_seconds": ctx.server.uptime, **figures(ledger)}
