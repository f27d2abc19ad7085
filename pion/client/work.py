"""What happens to one prefix: looked up, fetched, computed from the best that is stored; storing.py has the rest.

`PionPromptCache` is the policy on top: which of these happen on a hit, a miss, a mismatch, an outage.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl as tls
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np

from pion.client import assembly, caches, progress, reuse, transfer
from pion.client.arguments import checked_checkpoints
from pion.client.caches import CacheOptions, Layout, Prefilled
from pion.client.connection import Steps
from pion.client.errors import IncompleteError, PrefixMissError
from pion.client.explain import Explanation, block_table, note, receipt
from pion.client.formats import Formats
from pion.client.identity import cache_identity, model_identity, prefix_digest
from pion.client.lanes import Lanes
from pion.client.link import Link
from pion.client.slots import tree_kind
from pion.errors import AuthenticationError, CommandError, MismatchError

__all__ = ["Checkpoints", "Look", "Wanted", "Work"]

log = logging.getLogger("pion.client")

Checkpoints = int | Sequence[int] | None
Outcome = Literal["hit", "miss", "mismatch", "down"]
T = TypeVar("T")

_MOST_BOUNDARIES: Final = 1024
_LOSSLESS: Final = Formats("native", "native")
_UNUSABLE: Final = (
    IncompleteError, PrefixMissError, CommandError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
    MemoryError, RecursionError,
)  # fmt: skip
"""What reading an entry can raise that is not what it should be. Somebody else wrote it: it is a miss."""


@dataclass(frozen=True)
class Wanted:
    """A prefix that is asked for.

    Attributes:
        ids: its tokens.
        namespace: where it is, or is to be.
        identity, digest: of the model and its kind of cache; of that and the tokens.
        scope: under which prefixes that may be reused stand.
    """

    ids: np.ndarray[Any, np.dtype[np.uint32]]
    namespace: str
    identity: bytes
    digest: str
    scope: str

    @functools.cached_property
    def blocks(self) -> tuple[int, bytes]:
        """Hashes of its blocks; a hit needs none."""
        return block_table(self.ids)

    @property
    def near(self) -> tuple[str, bytes]:
        """What to ask for prefixes that begin alike."""
        return self.scope, self.blocks[1]


@dataclass(frozen=True)
class Look:
    """What came of asking for a prefix: a cache, or why not."""

    outcome: Outcome
    reason: str = ""
    cache: list[Any] | None = None


class Work:
    """The steps, and what they count. Attributes that are counters are read by anybody."""

    model: Any
    layout: Layout | None

    def __init__(
        self, link: Link, lanes: Lanes, formats: Formats, options: CacheOptions, *, as_states: bool, chunk: int | None,
        wait: float,
    ) -> None:  # fmt: skip
        self._link, self.lanes = link, lanes
        self.formats, self._options, self._as_states = formats, options, as_states
        self.prefill_chunk_size = chunk
        self._wait_at_most = wait
        self._apart = ""
        self.progress: progress.Progress | None = None
        self.background_store = False
        self.hits = self.misses = self.partial_hits = self.waits = 0
        self.tokens_asked = self.tokens_reused = 0
        self.mismatches = self.store_errors = 0
        self.fetch_ms_total = self.store_ms_total = self.last_prefill_ms = 0.0
        self._last: Explanation | None = None
        self._counting = threading.Lock()
        self._storing: list[threading.Thread] = []
        _works.add(self)

    def after_fork(self) -> None:
        """In a forked child: threads and held locks are the parent's."""
        self._counting = threading.Lock()
        self._storing = []
        self._link.after_fork()

    @property
    def outages(self) -> int:
        """Times the server was not there when it was needed."""
        return self._link.outages

    def _count(self, **more: float) -> None:
        with self._counting:
            for name, amount in more.items():
                setattr(self, name, getattr(self, name) + amount)

    def _note(self, said: Explanation) -> None:
        with self._counting:
            self._last = said
            self.tokens_asked += said["tokens"]
            self.tokens_reused += said["reused"]

    # --- the model ------------------------------------------------------------------------------------------------

    def _measured(self) -> Layout:
        """What the model's cache is made of now: weights, and their dtype, may be changed in place at any time."""
        identity, layout = model_identity(self.model), self.layout
        if layout is None or layout.identity != identity:
            layout = self.layout = caches.inspect_model(self.model, self._options)
            if layout.rows:
                self.formats.check(layout.dtype, len(layout.rows), layout.kv_dim)
        return layout

    # --- what is asked for ----------------------------------------------------------------------------------------

    def _want(self, ids: Any, namespace: str, layout: Layout) -> Wanted:
        identity = cache_identity(layout.identity, tree_kind(layout.trees))
        formats = f"{self.formats.k}/{self.formats.v}/{self.formats.protect}"
        asked = f"{formats}/{'states' if self._as_states else 'rows'}/{self._apart}"
        scope = cache_identity(identity, asked).hex()[:32]
        return Wanted(ids, namespace, identity, prefix_digest(identity, ids), scope)

    def _row_layers(self, layout: Layout) -> int:
        return 0 if self._as_states else len(layout.rows)

    def _sides(self, layout: Layout, layers: int) -> Any:
        return (_LOSSLESS if self._as_states else self.formats).sides(layout.dtype, layers)

    def _run(self, steps: Steps[T]) -> T:
        self._join()
        return self._link.run(steps)

    def _join(self) -> None:
        """Wait for what is being stored in the background."""
        for thread in self._storing[:]:
            if thread is not threading.current_thread():
                thread.join()
                with self._counting:
                    if thread in self._storing:  # another caller may have waited for it as well
                        self._storing.remove(thread)

    # --- looking and fetching -------------------------------------------------------------------------------------

    def _ask(self, namespace: str, digest: str | None, *, describe: bool = False) -> transfer.Found:
        """LOOKUP; the outcome is ``down`` when the server cannot be asked."""
        started = time.monotonic()
        if self._link.paused():
            return transfer.Found("down")
        try:
            offer = describe and digest is not None and self.lanes.may_offer(namespace, digest)
            found = self._run(transfer.lookup(namespace, digest, describe=describe, offer=offer))
        except tls.SSLError:
            raise
        except OSError as error:
            self._link.pause(time.monotonic() - started)
            self._link.went_down(error)
            return transfer.Found("down", str(error))
        except IncompleteError as error:
            log.warning("prefix %s cannot be used and is computed again: %s", namespace, error)
            return transfer.Found("miss", str(error))
        self._link.came_back()
        return found

    def _look(self, want: Wanted, layout: Layout) -> Look:
        """The cache of a prefix that is stored as a whole; or another outcome, and why."""
        started = time.perf_counter()
        found = self._ask(want.namespace, want.digest, describe=True)
        if found.entry is None:
            return Look(found.outcome, found.reason)  # type: ignore[arg-type]
        count = len(want.ids)
        try:
            cache, _ = self._fetch(found.entry, want.digest, layout, count, count)
        except MismatchError as error:
            return Look("mismatch", str(error))
        except (AuthenticationError, tls.SSLError):
            raise
        except _UNUSABLE as error:
            log.warning("prefix %s cannot be used and is computed again: %s", want.namespace, error or repr(error))
            return Look("miss", str(error))
        except OSError as error:
            self._link.went_down(error)
            return Look("down", str(error))
        self._count(hits=1, fetch_ms_total=(time.perf_counter() - started) * 1e3)
        said = receipt(count, "hit")
        said["stored"] = said["reused"] = said["shared"] = count
        said["source"] = want.namespace
        self._note(said)
        return Look("hit", "", cache)

    def _fetch(
        self, entry: transfer.Entry, digest: str, layout: Layout, rows: int, count: int
    ) -> tuple[list[Any], dict[int, Any]]:
        """A cache of the first `count` of `rows` tokens of an entry, and the states it was made of."""
        manifest, layers = entry.manifest, len(layout.rows)
        if manifest is not None:
            if manifest.trees != layout.trees or manifest.row_layers not in (0, layers):  # its digest says it is
                raise ValueError("the entry describes another kind of cache than the one it was registered for")
            layers = manifest.row_layers
        wanted = self._sides(layout, layers)
        parts = self._run(transfer.fetch(entry, digest, layout.of_rows(layers), wanted, rows, count, self.lanes))
        return assembly.built(self.model, self._options, layout, entry.manifest, parts, count), parts.states

    # --- computing ------------------------------------------------------------------------------------------------

    def _compute(
        self, want: Wanted, layout: Layout, names: Sequence[str] | None, boundaries: Sequence[int], reason: str,
        own: Sequence[str] = (),
    ) -> Prefilled:  # fmt: skip
        """A prefix computed from the best that is stored under these names (None: those the server finds) and under
        its `own`, or from nothing."""
        total = len(want.ids)
        said = receipt(total, reason or "nothing is stored for it")
        cache, done = self._reused(want, layout, names, own, said) if names != [] or own else (None, 0)
        started = time.perf_counter()
        if cache is None:
            cache = caches.new_cache(self.model, self._options)
        snapshots = {done: caches.snapshot(cache, done)} if 0 < done < total and not layout.cuttable else {}
        with progress.shown(self.progress, done, total) as told:
            out = caches.prefill_from(
                self.model,
                cache,
                want.ids.tolist(),
                done,
                chunk=self.prefill_chunk_size,
                options=self._options,
                boundaries=boundaries,
                progress=told,
            )
        out.snapshots |= snapshots
        self.last_prefill_ms = (time.perf_counter() - started) * 1e3
        self._count(misses=1, partial_hits=int(done > 0))
        self._note(said)
        return out

    def _reused(
        self, want: Wanted, layout: Layout, names: Sequence[str] | None, own: Sequence[str], said: Explanation
    ) -> tuple[list[Any] | None, int]:
        """A cache of the first tokens, and how many; what was found goes into `said`."""
        started = time.perf_counter()
        try:
            if names is None:
                names = self._run(reuse.near(want.near))
            names = list(dict.fromkeys([*own, *names]))
            found = self._run(reuse.find(names, want.identity.hex(), layout, want.ids))
            if not found:
                return None, 0
            note(said, found[0], want.ids, may_reuse=False)
            for best in found:
                manifest = best.entry.manifest
                if not reuse.worth(best, want.ids) or manifest is None:
                    return None, 0
                digest = prefix_digest(want.identity, best.entry.ids)
                try:
                    cache, _ = self._fetch(best.entry, digest, layout, manifest.tokens, best.usable)
                    break
                except (AuthenticationError, tls.SSLError):
                    raise
                except _UNUSABLE as error:  # the next one may be of use
                    log.warning("prefix %s: %s, stored beside it, cannot be used: %s", want.namespace,
                                best.entry.namespace, error or repr(error))  # fmt: skip
                    said["reason"] = str(error)
            else:
                return None, 0
        except (AuthenticationError, tls.SSLError):
            raise
        except _UNUSABLE as error:
            log.warning("prefix %s: what is stored beside it cannot be used: %s", want.namespace, error or repr(error))
            said["reason"] = str(error)
            return None, 0
        except OSError as error:
            self._link.went_down(error)
            said["reason"] = str(error)
            return None, 0
        said["reused"], said["source"] = best.usable, best.entry.namespace
        self._count(fetch_ms_total=(time.perf_counter() - started) * 1e3)
        log.info("prefix %s: %d of %d tokens reused: %s", want.namespace, best.usable, len(want.ids), best.reason)
        return cache, best.usable

    def _boundaries(self, checkpoints: Checkpoints, layout: Layout, total: int) -> list[int]:
        """Where states are taken down on the way."""
        checkpoints = checked_checkpoints(checkpoints)
        if checkpoints is None or layout.cuttable:
            return []
        if isinstance(checkpoints, int):
            found = list(range(checkpoints, total, checkpoints))
        else:
            found = sorted({at for at in checkpoints if 0 < at < total})
        if len(found) > _MOST_BOUNDARIES:
            raise ValueError(f"checkpoints would be taken {len(found)} times, at most {_MOST_BOUNDARIES} are stored")
        return found


_works: weakref.WeakSet[Work] = weakref.WeakSet()


def _after_fork() -> None:
    for work in list(_works):
        work.after_fork()


os.register_at_fork(after_in_child=_after_fork)
