"""What keeps a prefix, and what ends it: PIN, EXPIRE and LEASE.

Pins and ends are said of the entry and written into its file and the index like all that is said of it, so they outlive
a restart. Leases are in memory: they belong to clients that are at work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pion.errors import CommandError, OutOfMemoryError
from pion.store import layout, writes
from pion.store.entries import Entry
from pion.store.order import MAX_LEASES
from pion.store.prefixes import Tables
from pion.store.store import Store

EXPIRE_WORDS: Final = frozenset({"NX", "XX", "GT", "LT"})


class Keeping:
    """Pins, ends and leases of the prefixes of a store. Every method takes the store's lock."""

    def __init__(self, store: Store, tables: Tables) -> None:
        self.store = store
        self._tables = tables

    def _find(self, ns: bytes) -> Entry | None:
        return self.store.get(layout.PREFIX + ns)

    def _tell(self, entry: Entry, command: str, *, room: bool = True, **said: Any) -> None:
        """Change what is said of an entry. Raises CommandError; then nothing has changed."""
        before = entry.declared
        self.store.recounted(entry, lambda: entry.describe(entry.sides, replace(before, **said)))
        try:
            writes.append_meta(self.store, entry, command, room=room)
        except CommandError:
            self.store.recounted(entry, lambda: entry.describe(entry.sides, before))
            raise

    def pin(self, names: tuple[bytes, ...], pinned: bool) -> int:
        """Protect prefixes from eviction, or end that; how many are here (of UNPIN: how many were pinned)."""
        with self.store.lock:
            found = [entry for ns in names if (entry := self._find(ns)) is not None]
            changed = [entry for entry in dict.fromkeys(found) if entry.pinned != pinned]
            for entry in changed:
                if pinned:
                    self._tell(entry, "KV.PREFIX.PIN", pinned=True)
                else:
                    self._unpin(entry)
            return len(found) if pinned else len(changed)

    def _unpin(self, entry: Entry) -> None:
        """A full store must not refuse it: it makes room. Then somebody goes for its record, it itself if need be."""
        try:
            self._tell(entry, "KV.PREFIX.UNPIN", pinned=None)
        except OutOfMemoryError:
            self._tell(entry, "KV.PREFIX.UNPIN", room=False, pinned=None)
            self.store.settle()

    def expire(self, ns: bytes, when_ms: int, words: frozenset[str]) -> bool:
        """Let a prefix end at a time in ms since 1970; one that has come drops it. False: it is not here, or the
        words (as of Redis's EXPIRE) say no."""
        store = self.store
        with store.lock:
            entry = self._find(ns)
            if entry is None:
                return False
            now = entry.expires
            if (
                ("NX" in words and now)
                or ("XX" in words and not now)
                or ("GT" in words and (not now or when_ms <= now))
                or ("LT" in words and now and when_ms >= now)
            ):
                return False
            if when_ms <= store.now_ms():
                store.expire_one(entry)
                return True
            self._tell(entry, "KV.PREFIX.EXPIRE", expires=when_ms)
            self._tables.drop(ns)  # it is put again, with the end, by the first probe
            return True

    def persist(self, ns: bytes) -> bool:
        """Take the end away; False when there was none."""
        with self.store.lock:
            entry = self._find(ns)
            if entry is None or not entry.expires:
                return False
            self._tell(entry, "KV.PREFIX.PERSIST", expires=None)
            self._tables.drop(ns)
            return True

    def lease(self, ns: bytes, milliseconds: int, owner: object) -> bool:
        """Keep a prefix from eviction for a time, or claim one that is not complete; 0 ms give the lease back.

        A complete prefix may be leased by any number of clients. Of one that is missing or incomplete there is one
        lease at a time: whoever has it computes the rows. False: somebody else has it.
        """
        store = self.store
        with store.lock:
            key = layout.PREFIX + ns
            entry = store.get(key)
            whole = entry is not None and entry.mask == 3 and entry.complete
            leases = store.order.leases
            if milliseconds > 0 and not whole and leases.others(key, owner):
                return False
            if not leases.grant(key, owner, milliseconds / 1000):
                raise OutOfMemoryError(f"OOM {MAX_LEASES} names are leased")
            return True

    def about(self, ns: bytes) -> dict[str, str]:
        """What keeps a prefix and how it is related, as `name: value`; of one that is not here only its lease."""
        store = self.store
        with store.lock:
            key = layout.PREFIX + ns
            entry = store.get(key)
            lease = {"lease_ms": str(round(store.order.leases.remaining(key) * 1000))}
            if entry is None:
                return {"stored": "0", **lease}
            declared = entry.declared
            left = entry.expires - store.now_ms() if entry.expires else -1
            return {
                "stored": "1",
                "complete": str(int(entry.mask == 3 and entry.complete)),
                "rows": str(entry.row_count),
                "bytes": str(entry.nbytes),
                "file_bytes": str(entry.disk),
                "digest": declared.digest or "",
                "scope": _shown(declared.scope),
                "parent": _shown(declared.parent),
                "children": str(store.order.children(entry)),
                "pinned": str(int(entry.pinned)),
                "ttl": str((left + 500) // 1000 if entry.expires else -1),
                "pttl": str(left),
                **lease,
            }

    def words(self, key: bytes) -> str:
        """The same in words, for the end of WHY; empty when there is nothing to say. The lock is held."""
        store = self.store
        entry = store.find(key)
        out = []
        if entry is not None and entry.parent is not None:
            out.append(f"continues '{_shown(entry.parent)}'")
        if entry is not None and (children := store.order.children(entry)):
            out.append(f"continued by {children}, which are evicted before it")
        if entry is not None and entry.pinned:
            out.append("pinned")
        if entry is not None and entry.expires:
            out.append(f"expires in {(entry.expires - store.now_ms()) / 1000:.3f} s")
        if left := store.order.leases.remaining(key):
            out.append(f"leased for {left:.3f} s")
        return "".join(f"; {words}" for words in out)


def _shown(name: bytes | None) -> str:
    return (name or b"").decode("utf-8", "backslashreplace").translate({13: " ", 10: " "})
