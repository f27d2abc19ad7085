"""One flush for every command that waits for the medium.

A thread for each waiting command would use up the threads that other commands need. So commands that ask while a flush
runs form the next turn; the first of them starts it, in one thread, as soon as the running one has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pion.errors import CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context


class _Turn:
    """One flush and those who wait for it.

    Attributes:
        ended: set at its end; None = nobody can wait (calls run inline).
        error: why it failed.
        abandoned: its first command was cancelled before it ended: the others ask anew.
    """

    def __init__(self, ended: Any) -> None:
        self.ended = ended
        self.error: CommandError | None = None
        self.abandoned = True


class GroupCommit:
    """`await commit(ctx)` returns when everything acknowledged before the call is on stable storage."""

    def __init__(self) -> None:
        self._running: _Turn | None = None
        self._next: _Turn | None = None

    async def __call__(self, ctx: Context) -> None:
        """Raises CommandError: the flush failed."""
        new_event = ctx.server.new_event
        if new_event is None:
            await ctx.in_thread(ctx.engine.commit)
            return
        while True:
            turn = self._next
            if turn is None:
                turn = self._next = _Turn(new_event())
                await self._lead(ctx, turn)
            else:
                await turn.ended.wait()
            if turn.error is not None:
                raise type(turn.error)(*turn.error.args)
            if not turn.abandoned:
                return

    async def _lead(self, ctx: Context, turn: _Turn) -> None:
        try:
            while self._running is not None:
                await self._running.ended.wait()
            self._running, self._next = turn, None
            try:
                await ctx.in_thread(ctx.engine.commit)
            except CommandError as error:
                turn.error = error.with_traceback(None)
            turn.abandoned = False
        finally:
            if self._next is turn:
                self._next = None
            if self._running is turn:
                self._running = None
            turn.ended.set()
