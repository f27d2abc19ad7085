"""Which sessions of the attention engine hold rows of which stored prefixes."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["SUFFIX", "Sources"]

SUFFIX = b"_attn"  # clients keep the K/V of a namespace under its name with this behind it


class Sources:
    """What was loaded from where. Not thread-safe.

    Args:
        held: gives the sessions that the engine has.
    """

    def __init__(self, held: Callable[[], set[bytes]]) -> None:
        self._held = held
        self._from: dict[bytes, dict[bytes, int]] = {}  # session -> prefix -> rows, the last one loaded at the end
        self._into: dict[bytes, set[bytes]] = {}  # prefix -> sessions

    def note(self, sid: bytes, ns: bytes, rows: int, most: int) -> None:
        """Rows [0, rows) of a prefix are loaded into a session. Of more than `most` sessions, those are kept that the
        engine has: of no other can it matter."""
        known = self._from.setdefault(sid, {})
        known[ns] = max(rows, known.pop(ns, 0))
        self._into.setdefault(ns, set()).add(sid)
        if len(self._from) > most:
            for old in self._from.keys() - self._held() - {sid}:
                self.forget(old)

    def prefix(self, sid: bytes) -> bytes | None:
        """What a session holds: the prefix it was loaded from last, or the one that its name speaks of. None: what a
        client stored, who called it otherwise."""
        if known := self._from.get(sid):
            return next(reversed(known))
        return sid.removesuffix(SUFFIX) if sid.endswith(SUFFIX) else None

    def sessions(self, ns: bytes, start: int = 0) -> set[bytes]:
        """Those into which rows from `start` on were loaded."""
        return {sid for sid in self._into.get(ns, ()) if self._from[sid][ns] > start}

    def all(self) -> set[bytes]:
        """All sessions into which anything was loaded."""
        return set(self._from)

    def forget(self, sid: bytes) -> None:
        """A session ends."""
        for ns in self._from.pop(sid, {}):
            self._into[ns].discard(sid)
            if not self._into[ns]:
                del self._into[ns]
