"""One flush for every command that waits for the medium.

A thread or a task for each waiting command would cost more than its share of a flush. So a command answers `Later`,
which is a place in the list of those who wait; one task flushes as long as there are any, and ends all that had asked
before a flush began when it is over.

Writers that were answered together ask again together, a moment later. If the next flush began at once, the first of
them would have it for itself and the others wait for two. So it begins after a pause of a third of the last one's
duration when fewer wait than were just answered; a lone writer never waits.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Generator
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from pion import errors
from pion.errors import CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

log = logging.getLogger("pion.commands")

PAUSE_MOST: Final = 0.002  # seconds


class Later:
    """A reply that comes later, when `end` is called in the plane's thread. It may also be awaited.

    Attributes:
        value: the reply then.
        finish: turns it, or the CommandError given to `end`, into what is sent; set by the dispatcher.
        deliver: sends it; set by whoever asked the dispatcher.
    """

    __slots__ = ("_new_event", "deliver", "finish", "value")

    def __init__(self, value: Any, new_event: Callable[[], Any]) -> None:
        self.value = value
        self.finish: Callable[[Any], Any] = _same
        self.deliver: Callable[[Any], object] = _same
        self._new_event = new_event

    def end(self, error: CommandError | None) -> None:
        """It is due, or has failed."""
        self.deliver(self.finish(self.value if error is None else error))

    def __await__(self) -> Generator[Any, Any, Any]:
        event, ended = self._new_event(), []

        def deliver(value: Any) -> None:
            ended.append(value)
            event.set()

        self.deliver = deliver
        yield from event.wait().__await__()
        if isinstance(ended[0], CommandError):
            raise type(ended[0])(*ended[0].args)  # each has its own, or their tracebacks mix
        return ended[0]


def _same(value: Any) -> Any:
    return value


class GroupCommit:
    """Flushes for commands; `later` is what a handler returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Later] = []
        self._running = False

    def later(self, ctx: Context, value: Any) -> Any:
        """The reply `value`, due when everything acknowledged before is on stable storage; an error if it is not."""
        server = ctx.server
        if server.spawn is None or server.new_event is None:
            return _alone(ctx, value)
        reply = Later(value, server.new_event)
        with self._lock:
            self._waiting.append(reply)
        if not self._running:
            self._running = True
            server.spawn(functools.partial(self._flush, ctx))
        return reply

    async def _flush(self, ctx: Context) -> None:
        try:
            answered, pause = 1, 0.0
            while self._waiting or answered > 1:
                fewer = len(self._waiting) < answered and answered > 1
                turn, error, took = await ctx.in_thread(self._turn, ctx.engine.commit, pause if fewer else 0.0)
                answered, pause = len(turn), min(PAUSE_MOST, took / 3)
                for reply in turn:
                    reply.end(error)
        finally:
            self._running = False

    def _turn(self, commit: Callable[[], None], pause: float) -> tuple[list[Later], CommandError | None, float]:
        """One flush, in a thread: who waited for it, why it failed, seconds it took."""
        if pause:
            time.sleep(pause)
        with self._lock:
            # What they wait for is in the log: it was written before they began to wait.
            turn, self._waiting = self._waiting, []
        if not turn:
            return [], None, 0.0
        error: CommandError | None = None
        began = time.perf_counter()
        try:
            commit()
        except CommandError as failure:
            error = failure.with_traceback(None)
        except Exception:  # whatever it is, those who wait get an answer
            log.exception("a flush failed")
            error = CommandError(errors.INTERNAL)
        return turn, error, time.perf_counter() - began


async def settled(value: Any) -> Any:
    """What a handler answered, also when it comes later."""
    return await value if type(value) in (CoroutineType, Later) else value


async def _alone(ctx: Context, value: Any) -> Any:
    await ctx.in_thread(ctx.engine.commit)
    return value
