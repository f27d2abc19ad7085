"""The receipt: what lookups and fetches saved (wire.md §8)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pion import limits


@dataclass(slots=True)
class Ledger:
    """Counters since the start or the last reset.

    Attributes:
        hits, misses: answered lookups.
        hits_measured: hits whose prefill time was told by a client.
        tokens_served: tokens of the hits; bytes_served: payload of the fetches.
        prefill_us_saved: microseconds of prefill avoided, estimated where nobody measured them.
        prefill_us_measured: the measured part.
        semantic_hits, semantic_misses, moe_hits, moe_misses, vector_queries: of other families.
    """

    hits: int = 0
    misses: int = 0
    hits_measured: int = 0
    tokens_served: int = 0
    bytes_served: int = 0
    prefill_us_saved: int = 0
    prefill_us_measured: int = 0
    semantic_hits: int = 0
    semantic_misses: int = 0
    moe_hits: int = 0
    moe_misses: int = 0
    vector_queries: int = 0

    def hit(self, tokens: int, prefill_us: int) -> None:
        """Book a hit; without a measured time the seeds' estimate per token counts."""
        self.hits += 1
        self.tokens_served += max(tokens, 0)
        if prefill_us > 0:
            self.hits_measured += 1
            self.prefill_us_saved += prefill_us
            self.prefill_us_measured += prefill_us
        elif tokens > 0:
            self.prefill_us_saved += tokens * limits.PREFILL_US_PER_TOKEN

    def reset(self) -> None:
        """Zero everything."""
        for field in fields(self):
            setattr(self, field.name, 0)
