"""The engine's methods for sessions and recurrent state: what V.* and SSM.PREFIX.* call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pion._core.stream import Extents
from pion.store import bodies
from pion.store.bodies import Write
from pion.store.entries import CrowdedError, Entry
from pion.store.exports import Exports, Request
from pion.store.ledger import Ledger
from pion.store.reading import StoredRows
from pion.store.sessions import SessionInfo, Sessions
from pion.store.ssm import States
from pion.store.store import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


class SessionMethods:
    """Mixed into `Engine`."""

    ledger: Ledger
    deferred_room: bool
    _policy: str
    _store: Store
    _sessions: Sessions
    _states: States
    _exports: Exports

    if TYPE_CHECKING:

        def _acknowledge(self) -> None: ...  # of the engine
        def _roomy(self, write: Callable[..., T], *args: Any) -> T: ...

    def on_new_meaning(self, tell: Callable[[bytes, int | None], None]) -> None:
        """Have somebody told when a name may stand for other rows than before: the name of a prefix, and the first of
        the rows, or None when the prefix is another one, whatever became of the one before, or its time has ended.

        Args:
            tell: called with the store's lock held.
        """

        def told(entry: Entry, start: int | None) -> None:
            if entry.is_prefix:
                tell(entry.name, start)

        self._store.on_new_meaning = told

    def v_exists(self, sid: bytes) -> bool:
        """Whether the session is there."""
        return self._sessions.exists(sid)

    def v_create(self, sid: bytes, dim: int, fmt_code: int, layers: tuple[tuple[int, int], ...] = ()) -> int:
        """Make a session unless it is there (its dimension and format are then kept); returns its number.

        Args:
            layers: (dim, format) of the first layers, one by one; `dim` and `fmt_code` hold for the others, if `dim`
                is not 0. A format is a code, with the R of bf16_rope_fp8_body from bit 8 on.

        Raises:
            MismatchError: the session is there with other layers.
        """
        index = self._roomy(self._sessions.create, sid, dim, fmt_code, layers)
        self._acknowledge()
        return index

    def v_dim(self, sid: bytes, layer: int = 0) -> int:
        """Values per row of a layer; 0 for one beyond a schema without a default."""
        return self._sessions.dim(sid, layer)

    def v_num_layers(self, sid: bytes) -> int:
        """One more than the highest layer ever stored, or as many as the schema has."""
        return self._sessions.num_layers(sid)

    def v_info(self, sid: bytes) -> SessionInfo:
        """What a session is; not a use of it."""
        return self._sessions.info(sid)

    def v_totals(self) -> dict[str, int]:
        """The lines of V.INFO without a session."""
        totals = self._store.totals
        return {"sessions": totals.sessions, "total_tokens": totals.rows, "total_fetches": self._sessions.fetches}

    def v_store(
        self, sid: bytes, layer: int, start: int, count: int, blob: Buffer, fmt: str = "F32", digest: str | None = None
    ) -> None:
        """Store rows [start, start + count) of a layer.

        Args:
            blob: count x dim values, row-major, little-endian.
            fmt: of blob: F32, F16 or BF16.
            digest: the prefix must have been registered with it.

        Raises:
            MismatchError: it was registered with another one, or none; nothing is stored.
        """
        rows = sid, layer, start, count, blob, fmt, digest
        try:
            self._sessions.store_rows(*rows)
        except CrowdedError:
            self._roomy(self._sessions.store_rows, *rows)
        if self._policy == "always":
            self._acknowledge()

    def v_store_open(self, sid: bytes, layer: int, start: int, count: int, nbytes: int) -> Write:
        """The same for a body of `nbytes` that arrives in pieces: feed the sink, then finish or abort."""
        return self._roomy(self._sessions.open_store, sid, layer, start, count, nbytes)

    def v_store_heavy(self, sink: Write, fmt: str) -> bool:
        """`v_store_finish` has to convert the body in its file first: call it in a thread."""
        return bodies.heavy(sink, fmt)

    def v_store_finish(self, sink: Write, fmt: str, digest: str | None = None) -> None:
        """Publish the rows of a sink that has everything; `digest` as in `v_store`."""
        self._finish(sink, self._sessions.finish_store, fmt, digest)
        self._acknowledge()

    def _finish(self, sink: Write, finish: Callable[..., None], *args: Any) -> None:
        try:
            self._roomy(finish, sink, *args)
        except CrowdedError:
            if not self.deferred_room:  # else it is tried again
                bodies.abandon(self._store, sink)
            raise

    def v_store_abort(self, sink: Write) -> None:
        """Forget a sink."""
        bodies.abandon(self._store, sink)

    def v_must_wait(self, sid: bytes) -> bool:
        """The next fetch would first compare checksums of much data: call `v_prepare` in a thread before it."""
        return self._sessions.must_wait(sid)

    def v_prepare(self, sid: bytes) -> None:
        """Compare the checksums of a session, once after each start; other calls go on meanwhile."""
        self._sessions.prepare(sid)

    def v_fetch_range(self, sid: bytes, layer: int, start: int, end: int, native: bool = False) -> Extents | None:
        """Rows [start, end) of a layer, as FP32.

        Args:
            native: a layer of format fp16 answers its words as they are.

        Returns:
            None when the layer has none of these rows; rows missing in between are zeros. Of a prefix with a declared
            shape missing rows are an error.
        """
        return self._served(self._sessions.fetch_range(sid, layer, start, end, native))

    def v_read(self, sid: bytes, layer: int, start: int, end: int) -> Extents | None:
        """`v_fetch_range` for this process itself: nothing is served."""
        return self._sessions.fetch_range(sid, layer, start, end, False)

    def v_read_stored(self, sid: bytes, layer: int, start: int, end: int) -> StoredRows | None:
        """`v_fetch_stored` for this process itself: nothing is served."""
        return self._sessions.fetch_stored(sid, layer, start, end)

    def v_fetch_stored(self, sid: bytes, layer: int, start: int, end: int) -> StoredRows | None:
        """The same rows as they are stored, with what they are."""
        return self._sent(self._sessions.fetch_stored(sid, layer, start, end))

    def v_batch_stored(
        self, sid: bytes, start: int, end: int, num_layers: int | None = None
    ) -> list[StoredRows | None]:
        """Rows [start, end) of the first layers (default: all that are stored) as they are stored."""
        return [self._sent(found) for found in self._sessions.batch_stored(sid, start, end, num_layers)]

    def v_fetch_ids(self, sid: bytes, layer: int, ids: list[int]) -> Extents | None:
        """Single rows, as FP32, in the order asked for."""
        return self._served(self._sessions.fetch_ids(sid, layer, ids))

    def v_fetch_batch(
        self, sid: bytes, start: int, end: int, num_layers: int | None = None, native: bool = False
    ) -> list[Extents | None]:
        """Rows [start, end) of the first layers (default: all that are stored)."""
        return [self._served(body) for body in self._sessions.fetch_batch(sid, start, end, num_layers, native)]

    def _served(self, body: Extents | None) -> Extents | None:
        if body is not None:
            self.ledger.bytes_served += len(body)
        return body

    def _sent(self, found: StoredRows | None) -> StoredRows | None:
        if found is not None:
            self.ledger.bytes_served += found.nbytes
        return found

    def v_export(self, k_sid: bytes, v_sid: bytes, start: int, end: int, layers: int, heads: int, head_dim: int) -> str:
        """Path of a safetensors file with rows [start, end) of the first layers: fp16, (1, heads, rows, head_dim).

        The same path again while neither session changes. The file goes with the next change, ten minutes after it was
        last asked for, or with the engine: whoever has it open by then keeps it.
        """
        request = Request(k_sid, v_sid, start, end, layers, heads, head_dim)
        path = self._exports.path(request)
        self.ledger.bytes_served += 2 * layers * request.side_bytes
        return path

    def v_snapshot(self, sid: bytes) -> int:
        """Remember the lengths of a session's layers; returns a number for `v_restore`."""
        return self._sessions.snapshot(sid)

    def v_restore(self, sid: bytes, snap: int) -> None:
        """Cut a session's layers back to a snapshot. Lost with a crash only if the cut had not reached the file."""
        self._roomy(self._sessions.restore, sid, snap)
        self._acknowledge()

    def v_commit(self, sid: bytes, snap: int) -> int:
        """Forget a snapshot; 1 when it was there."""
        return self._sessions.release(sid, snap)

    # --- recurrent state --------------------------------------------------------------------------------------------

    def ssm_store(self, sid: bytes, layer: int, blob: Buffer, digest: str | None = None) -> None:
        """Replace the recurrent state of a layer; `digest` as in `v_store`."""
        self._roomy(self._states.put, sid, layer, blob, digest)
        self._acknowledge()

    def ssm_store_open(self, sid: bytes, layer: int, nbytes: int) -> Write:
        """The same for a state that arrives in pieces."""
        return self._roomy(self._states.open, sid, layer, nbytes)

    def ssm_store_finish(self, sink: Write, digest: str | None = None) -> None:
        """Publish a state that has arrived; `digest` as in `v_store`."""
        self._finish(sink, self._states.finish, digest)
        self._acknowledge()

    def ssm_fetch(self, sid: bytes, layer: int) -> Extents | None:
        """The state of a layer, or None."""
        return self._states.get(sid, layer)

    def ssm_drop(self, sid: bytes, layer: int | None = None) -> None:
        """Drop the state of a layer, or of all layers."""
        self._roomy(self._states.drop, sid, layer)
        self._acknowledge()
