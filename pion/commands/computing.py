"""Commands that keep a core busy, in threads of their own.

A command that waits in a task begins when the plane's batch is over, and its reply takes two turns of the event loop.
Here the work begins at once, beside the batch, and its reply takes one: half a millisecond less of each command.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pion import errors
from pion.commands.commits import Later
from pion.errors import CommandError

log = logging.getLogger("pion.commands")


class Computing:
    """As many threads as there are cores.

    Args:
        soon: `soon(fn, *args)` calls in the plane's thread; may be called from any thread, also when that has ended.
        new_event: for `Later`.
    """

    def __init__(self, soon: Callable[..., object], new_event: Callable[[], Any]) -> None:
        self._soon, self._new_event = soon, new_event
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, "pion-compute")  # each starts when it is needed

    def later(self, fn: Callable[[], Any]) -> Later:
        """The reply that `fn` returns, or the CommandError that it raises."""
        reply = Later(None, self._new_event)
        self._threads.submit(self._run, fn, reply)
        return reply

    def _run(self, fn: Callable[[], Any], reply: Later) -> None:
        error: CommandError | None = None
        try:
            reply.value = fn()
        except CommandError as refusal:
            error = refusal.with_traceback(None)  # its frames hold the arguments
        except Exception:  # whatever it is, who waits gets an answer
            log.exception("a computation failed")
            error = CommandError(errors.INTERNAL)
        self._soon(reply.end, error)

    def close(self) -> None:
        """Begins nothing more; waits for what is running."""
        self._threads.shutdown(cancel_futures=True)
