"""A prefix that this process computes: claimed while it does, and stored."""

from __future__ import annotations

import logging
import ssl as tls
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from pion.client import assembly, calls, flights, transfer
from pion.client.caches import Layout, Prefilled
from pion.client.connection import Flight, Steps
from pion.client.work import Wanted, Work
from pion.errors import AuthenticationError, CommandError, MismatchError, PionError
from pion.limits import MAX_PREFILL_MS

__all__ = ["Storing"]

log = logging.getLogger("pion.client")

_POLL: Final = (0.02, 0.5)  # seconds between two questions whether another process is done: first, at most


class Storing(Work):
    """The steps of a prefix that is not there yet."""

    # --- one at a time --------------------------------------------------------------------------------------------

    def _claim(
        self, want: Wanted, layout: Layout, claim: flights.Claim, *, missing: bool
    ) -> tuple[list[Any] | None, list[str] | None]:
        """Get the lease of a prefix that is about to be computed, if it can be had: it cannot where nobody knows, or
        after a long enough wait. The cache, when another process has stored it meanwhile; and the names of prefixes
        that begin alike, if known."""
        deadline = time.monotonic() + self._wait_at_most
        pause, most = _POLL
        waited = False

        def ask() -> Steps[list[Any]]:
            match = [transfer.match_command(want.near)] if want.blocks[1] else []
            replies = yield Flight([claim.command, ["KV.PREFIX.INFO", want.namespace], *match])
            return replies

        while True:
            claim.pending = True
            try:
                granted, about, *found = self._run(ask())
            except tls.SSLError:
                raise
            except OSError as error:
                self._link.went_down(error)
                return None, []
            names = [name for reply in found for name in transfer.names_of(reply) if name != want.namespace]
            if granted == 1:
                break
            claim.pending = False
            if granted != 0:  # refused: a server without leases, or no right to them
                return None, names
            if not waited:
                self._count(waits=1)
                waited = True
            if time.monotonic() >= deadline:
                log.warning("prefix %s: another process has computed it for %g s; it is computed here too",
                            want.namespace, self._wait_at_most)  # fmt: skip
                return None, names
            time.sleep(pause)
            pause = min(1.5 * pause, most)
        claim.start()
        if missing and isinstance(about, bytes) and b"complete:1" in about.split(b"\r\n"):
            look = self._look(want, layout)
            if look.cache is not None:
                return look.cache, names
        return None, names

    def _new_claim(self, namespace: str, holder: flights.Holder) -> flights.Claim:
        run = self._link.run
        return flights.Claim(lambda command: run(calls.call(command, None)), namespace, holder)

    def _release(self, claim: flights.Claim) -> None:
        """Give a lease back that may have been granted; once is enough, twice does no harm."""
        claim.stop()
        if not claim.pending:
            return
        claim.pending = False
        try:
            self._link.run(calls.call(claim.release_command, None))
        except (OSError, CommandError) as error:  # it ends by itself
            log.debug("a lease was not given back: %s", error)

    # --- storing --------------------------------------------------------------------------------------------------

    def _store(
        self, want: Wanted, layout: Layout, done: Prefilled, *, replace: bool, claim: flights.Claim | None,
        over: Callable[[bool], None] = lambda stored: None,
    ) -> None:  # fmt: skip
        """Register and send a prefix. A failure costs the next caller a miss, never this one its cache.

        Args:
            over: called once, with whether it is stored.

        Raises:
            MismatchError: the namespace holds something else.
        """
        started, count = time.perf_counter(), len(want.ids)
        registered = sent = False
        try:
            plan = assembly.planned(done, layout, want.ids, want.identity, self._as_states)
            rows = layout.of_rows(self._row_layers(layout))
            prefill_ms = min(MAX_PREFILL_MS, max(1, round(self.last_prefill_ms)))
            self._run(
                transfer.register(
                    want.namespace,
                    rows,
                    self._sides(layout, rows.cache_len),
                    count,
                    want.digest,
                    prefill_ms,
                    want.blocks,
                    states=len(plan.states),
                    scope=want.scope,
                    replace=replace,
                )
            )
            registered = True
            if not self.background_store:
                sent = True
                self._send(want, layout, plan, plan.rows, started, claim, over)
                return
            # Packed now: the caller is about to append to these arrays, and a reference to them would cost it a copy.
            packed = list(plan.rows())
            args = (want, layout, plan, lambda: packed, started, claim, over)
            thread = threading.Thread(target=self._send, args=args, name="pion store")
            if claim is not None:
                claim.holder.thread = thread
            thread.start()
            sent = True
            with self._counting:
                self._storing.append(thread)
        except (MismatchError, AuthenticationError, tls.SSLError):
            raise
        except Exception as error:  # whatever it is: the caller has computed its cache and gets it
            self._not_stored(want.namespace, error)
        finally:
            if not sent:
                over(False)
                self._leave_nothing(want, claim, registered=registered)

    def _leave_nothing(self, want: Wanted, claim: flights.Claim | None, *, registered: bool) -> None:
        """After a store that failed here: no part of it, and no lease."""
        if registered:
            try:
                self._link.run(calls.abandon(want.namespace, want.digest))
            except (OSError, PionError) as error:  # an incomplete entry is a miss
                log.debug("prefix %s: its parts were not dropped: %s", want.namespace, error)
        if claim is not None:
            self._release(claim)

    def _send(
        self, want: Wanted, layout: Layout, plan: assembly.Plan, rows: Callable[[], transfer.Rows], started: float,
        claim: flights.Claim | None, over: Callable[[bool], None],
    ) -> None:  # fmt: skip
        stored = lost = False
        try:
            if claim is not None:
                claim.stop()
            tail = [claim.release_command] if claim is not None and claim.pending else []
            self._link.run(
                transfer.send(want.namespace, want.digest, layout.dtype, len(want.ids), rows(), plan.states, tail)
            )
            stored = True
            if claim is not None:
                claim.pending = False
            self._stored(want, layout)
        except OSError as error:  # what arrived is an incomplete entry: a miss, and the lease ends by itself
            lost = True
            if claim is not None:
                claim.pending = False
            self._not_stored(want.namespace, error)
        except Exception as error:
            where = assembly.not_numbers(rows(), layout.dtype) if isinstance(error, CommandError) else ""
            self._not_stored(want.namespace, error, where)
        finally:
            over(stored)
            if not stored and not lost:
                self._leave_nothing(want, claim, registered=True)
        self._count(store_ms_total=(time.perf_counter() - started) * 1e3)

    def _stored(self, want: Wanted, layout: Layout) -> None:
        """What is to follow a store; in the thread that stored."""

    def _not_stored(self, namespace: str, error: Exception, more: str = "") -> None:
        self._count(store_errors=1)
        what = f"prefix {namespace} was computed but not stored"
        if more:
            log.warning("%s: %s (%s)", what, more, error)
        elif not isinstance(error, OSError):
            log.warning("%s: %s", what, error)
        elif not self._link.went_down(error, what):
            log.info("%s: %s", what, error)
