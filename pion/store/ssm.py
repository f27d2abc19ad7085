"""SSM.PREFIX.*: recurrent state, a part of the entry of its namespace (wire.md §7).

It lives and dies with the rows: same file, same budget, same eviction. An entry that holds nothing but state is no
session and no hit of a LOOKUP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pion._core.stream import Extents
from pion.errors import CommandError
from pion.store import bodies, layout, loader, writes
from pion.store.bodies import Write
from pion.store.entries import Entry, Payload, SessionNotFoundError
from pion.store.layout import UNDECLARED
from pion.store.store import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COMMAND = "SSM.PREFIX.STORE"


class States:
    """The state commands on a store. Every method takes the store's lock."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @contextlib.contextmanager
    def _entry(self, sid: bytes) -> Iterator[Entry]:
        """The entry of a name, for a first record; one that was made for it goes when that is refused."""
        if not sid:
            raise CommandError(f"ERR {_COMMAND} failed (alloc or worker bound)")
        store, key = self.store, layout.PREFIX + sid
        found, ended = store.get(key), store.ends.get(key)
        entry = found or store.create(key, [None, None], UNDECLARED)
        store.touch(entry)
        try:
            yield entry
        except CommandError as error:
            if found is None and not entry.gone:
                store.drop(entry, ended or f"never stored: its {_COMMAND} was refused: {error}")
            raise

    def put(self, sid: bytes, layer: int, blob: Buffer, digest: str | None) -> None:
        """Replace the state of one layer; of the prefix with this digest, if it says so."""
        store = self.store
        with store.lock:
            if digest is not None:
                found = store.get(layout.PREFIX + sid)
                if found is None:
                    raise SessionNotFoundError
                found.expect(digest)
            with self._entry(sid) as entry:
                payload = writes.append_payload(
                    store, entry, _COMMAND, layout.STATE, blob, layer=layer, side=layout.STATES
                )
            self._publish(entry, layer, payload)

    def open(self, sid: bytes, layer: int, nbytes: int) -> Write:
        """Where a large state goes while it arrives."""
        store = self.store
        with store.lock, self._entry(sid) as entry:
            return bodies.open_write(store, entry, layout.STATE, nbytes, side=layout.STATES, layer=layer)

    def finish(self, sink: Write, digest: str | None) -> None:
        """The state has arrived, and belongs to this digest."""
        with self.store.lock:
            try:
                bodies.expect(self.store, sink, digest)
            except CommandError:
                entry = sink.entry
                if not (entry.gone or entry.mask or entry.states or entry.writers):  # made for this body
                    self.store.drop(entry, "never stored: a state came for a prefix that is not there")
                    raise SessionNotFoundError from None
                raise
            payload = bodies.publish(self.store, sink)
            assert payload is not None
            self._publish(sink.entry, sink.layer, payload)

    def _publish(self, entry: Entry, layer: int, payload: Payload) -> None:
        old = entry.states.get(layer)
        if old is not None and entry.rows is not None:
            entry.rows.lost(old.nbytes)
        entry.states[layer] = payload
        entry.has_states = True
        if self.store.fragmented is not None:
            self.store.fragmented(entry)

    def get(self, sid: bytes, layer: int) -> Extents | None:
        """The state of one layer, or None."""
        store = self.store
        with store.lock:
            entry = store.get(layout.PREFIX + sid)
            payload = entry.states.get(layer) if entry is not None else None
            if entry is None or payload is None:
                return None
            store.touch(entry)
            loader.check_payload(store, entry, payload)
            return Extents([(store.ref(entry), payload.offset, payload.nbytes)])

    def drop(self, sid: bytes, layer: int | None) -> None:
        """Drop the state of one layer, or of all; an entry that held nothing else goes with it."""
        store = self.store
        with store.lock:
            entry = store.get(layout.PREFIX + sid)
            doomed = [] if entry is None else [n for n in entry.states if layer is None or n == layer]
            if entry is None or not doomed:
                return
            if not entry.mask and len(doomed) == len(entry.states):
                store.drop(entry, "dropped by SSM.PREFIX.DROP")
                return
            writes.append_payload(
                store, entry, "SSM.PREFIX.DROP", layout.STATE_DROP, layer=layer or 0, start=0 if layer is None else 1
            )
            for number in doomed:
                payload = entry.states.pop(number)
                if entry.rows is not None:
                    entry.rows.lost(payload.nbytes)
            entry.has_states = bool(entry.states)
