"""KV.PREFIX.MATCH: which stored prefixes of a scope begin like the tokens that are asked for?

A tree of block hashes for each scope that was ever asked for (`_core/prefixtree.pyx`). It is made from the block tables
in the entry files at the first question after a start, and follows what comes and goes from then on.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from pion._core import framing
from pion._core.prefixtree import MAX_FOUND, PrefixTree
from pion._core.stream import Extents
from pion.errors import CommandError
from pion.store import loader
from pion.store.entries import Entry
from pion.store.store import Store

__all__ = ["Match", "Matches"]

_AT_ONCE: Final = 64  # entries between two looks at the lock


class Match(NamedTuple):
    """A prefix that begins like what is asked for.

    Attributes:
        ns: its name.
        blocks: blocks that are the same; the hashes are hints, the digest decides.
        rows, digest: as declared.
    """

    ns: bytes
    blocks: int
    rows: int | None
    digest: str | None


class _Scope:
    """The tree of a scope, and which entry has which number in it."""

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.entries: list[Entry | None] = []
        self.numbers: dict[Entry, int] = {}
        self._free: list[int] = []

    def add(self, entry: Entry, hashes: bytes) -> None:
        number = self.numbers.get(entry)
        if number is None:
            number = self._free.pop() if self._free else len(self.entries)
            if number == len(self.entries):
                self.entries.append(None)
        self.tree.add(number, hashes)
        self.entries[number] = entry
        self.numbers[entry] = number

    def remove(self, entry: Entry) -> None:
        number = self.numbers.pop(entry, None)
        if number is not None:
            self.tree.remove(number)
            self.entries[number] = None
            self._free.append(number)


class Matches:
    """The match index of a store. `came`, `changed` and `went` are told with the store's lock held."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unsorted: dict[Entry, None] = {}  # whose scope has not been looked at
        self._unread: dict[bytes, dict[Entry, None]] = {}  # by scope: whose block table has not been read
        self._scopes: dict[bytes, _Scope] = {}
        self._scope_of: dict[Entry, bytes] = {}
        for entry in store.entries.values():
            self.came(entry)

    def came(self, entry: Entry) -> None:
        """There is a new entry."""
        if entry.is_prefix:
            self._unsorted[entry] = None

    def went(self, entry: Entry) -> None:
        """An entry is gone."""
        self._unsorted.pop(entry, None)
        scope = self._scope_of.pop(entry, None)
        if scope is None:
            return
        self._unread.get(scope, {}).pop(entry, None)
        if scope in self._scopes:
            self._scopes[scope].remove(entry)
            if not self._scopes[scope].numbers and not self._unread.get(scope):
                del self._scopes[scope]
        if not self._unread.get(scope):
            self._unread.pop(scope, None)

    def changed(self, entry: Entry) -> None:
        """An entry has another scope or another block table."""
        self.went(entry)
        self.came(entry)

    def must_prepare(self, scope: bytes) -> bool:
        """The next question reads files: call `prepare` in a thread before it."""
        with self._store.lock:
            waiting = [*self._unsorted, *self._unread.get(scope, {})]
            return len(waiting) > _AT_ONCE or any(entry.rows is None for entry in waiting)

    def prepare(self, scope: bytes) -> None:
        """Take in what came since the last question."""
        while True:
            with self._store.lock:
                if not self._sort(_AT_ONCE) and not self._read(scope, _AT_ONCE):
                    return

    def _sort(self, most: int) -> bool:
        """Look at the scope of some new entries; False when there were none."""
        some = [entry for entry, _ in zip(self._unsorted, range(most), strict=False)]
        for entry in some:
            del self._unsorted[entry]
            try:
                scope = entry.peek().scope
            except (framing.FramingError, struct.error, KeyError):  # no description: the file will tell
                scope = entry.declared.scope if self._store.get(entry.key) is entry else None
            if scope is not None:
                self._scope_of[entry] = scope
                self._unread.setdefault(scope, {})[entry] = None
        return bool(some)

    def _read(self, scope: bytes, most: int) -> bool:
        """Read the block tables of some entries of a scope; False when there were none."""
        some = [entry for entry, _ in zip(self._unread.get(scope, {}), range(most), strict=False)]
        for entry in some:
            if self._store.get(entry.key) is not entry:  # `went` has taken it out, or will
                self._unread.get(scope, {}).pop(entry, None)
                continue
            self._unread[scope].pop(entry, None)
            blocks = entry.blocks
            if blocks is None or not blocks.nbytes:
                continue
            try:
                loader.check_payload(self._store, entry, blocks)
                hashes = Extents([(self._store.ref(entry), blocks.offset, blocks.nbytes)]).tobytes()
            except (CommandError, OSError, EOFError):  # out of service by now, or not readable: nothing to match
                continue
            self._scopes.setdefault(scope, _Scope()).add(entry, hashes)
        return bool(some)

    def match(self, scope: bytes, hashes: bytes, limit: int, name_prefix: bytes = b"") -> list[Match]:
        """Complete prefixes of a scope that share blocks with these hashes, those that share most first.

        Args:
            hashes: chained u64 block hashes, little-endian, in token order.
            limit: most answers.
            name_prefix: only namespaces that begin so.
        """
        self.prepare(scope)
        store = self._store
        with store.lock:
            known = self._scopes.get(scope)
            if known is None:
                return []
            out: list[Match] = []
            for number, blocks in known.tree.match(hashes, min(MAX_FOUND, 8 * limit + 64)):
                entry = known.entries[number]
                if entry is None or not entry.name.startswith(name_prefix):
                    continue
                if store.get(entry.key) is entry and entry.mask == 3 and entry.complete:
                    out.append(Match(entry.name, blocks, entry.declared.rows, entry.declared.digest))
                    if len(out) == limit:
                        break
            return out

    def figures(self) -> tuple[int, int]:
        """Blocks held, and bytes of memory."""
        with self._store.lock:
            trees = [scope.tree for scope in self._scopes.values()]
            return sum(map(len, trees)), sum(tree.nbytes for tree in trees)
