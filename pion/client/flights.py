"""One computes, the others wait: among the threads of a process, and among processes through the server's leases.

Within a process a *turn* belongs to the thread that computes a prefix; those who want the same one wait until it is
over. Between processes a *claim* is a lease that the server grants to one owner while a prefix is not complete; the
owner renews it while it computes. Neither is needed for being right: whoever waited too long, or whose predecessor
died, computes for itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from pion.errors import PionError

__all__ = ["LEASE_MS", "Claim", "Holder", "Turn", "begin", "claim_command", "end"]

LEASE_MS: Final = 10_000
_RENEW: Final = LEASE_MS / 1000 / 3
_LOOK: Final = 1.0  # seconds after which one who waits looks whether there is still somebody to wait for

_lock = threading.Lock()
_turns: dict[object, Turn] = {}


class Holder:
    """The call that computes a prefix, and then perhaps the thread that stores it.

    An exception such as KeyboardInterrupt may come between any two instructions, those that give things back included.
    Whoever depends on a call therefore asks whether it is still running, and does not rely on being told.

    Args:
        frame: of the call, in the thread that makes this.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        self._ident = threading.get_ident()
        self.thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Whether the call, or the thread it was handed to, is still running."""
        if self.thread is not None and self.thread.ident is not None:
            return self.thread.is_alive()
        held, frame = self._frame, sys._current_frames().get(self._ident)
        while held is not None and frame is not None:
            if frame is held:
                return True
            frame = frame.f_back
        return False

    def leave(self) -> None:
        """The call ends; what its frame refers to must not be kept alive."""
        self._frame = None


class Turn:
    """The computing of one prefix by one thread.

    Args:
        holder: who computes; None: somebody who is sure to end it.

    Attributes:
        over: set when it has ended.
        stored: whether the prefix is on the server then.
    """

    def __init__(self, holder: Holder | None = None) -> None:
        self.holder = holder
        self.over = threading.Event()
        self.stored = False

    @property
    def active(self) -> bool:
        """Whether somebody computes; not so when a call was interrupted and could not end it."""
        return self.holder is None or self.holder.active

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, at most so long; whether the prefix is stored."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 or self.over.is_set():
            if self.over.wait(min(left, _LOOK)):
                return self.stored
            if not self.active:
                return False
        return False


def begin(key: object, holder: Holder | None = None) -> tuple[Turn, bool]:
    """The turn of a prefix, and whether it is the caller's, who must `end` it."""
    with _lock:
        turn = _turns.get(key)
        if turn is not None and turn.active:
            return turn, False
        turn = _turns[key] = Turn(holder)
        return turn, True


def end(key: object, turn: Turn, stored: bool) -> None:
    """Give a turn back; once is enough, twice does no harm."""
    with _lock:
        if _turns.get(key) is turn:
            del _turns[key]
    if not turn.over.is_set():
        turn.stored = stored
        turn.over.set()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _turns.clear()  # the threads that had them are the parent's


os.register_at_fork(after_in_child=_after_fork)


def claim_command(namespace: str, owner: str, milliseconds: int) -> list[Any]:
    """The command that claims a prefix, or with 0 gives it back; answers 1, or 0 when another owner computes it."""
    return ["KV.PREFIX.LEASE", namespace, milliseconds, "OWNER", owner]


class Claim:
    """A lease that is asked for, and then renewed in a thread until it is given back or its holder is gone.

    Args:
        ask: sends one command and returns its reply.
        namespace: what is claimed.
        holder: the call that computes it.

    Attributes:
        pending: whether the server may have granted it and it was not given back yet.
    """

    def __init__(self, ask: Callable[[list[Any]], Any], namespace: str, holder: Holder) -> None:
        self._ask, self._namespace, self.holder = ask, namespace, holder
        self._owner = uuid.uuid4().hex  # a name that nobody else has
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.pending = False

    @property
    def command(self) -> list[Any]:
        """What asks for it."""
        return claim_command(self._namespace, self._owner, LEASE_MS)

    @property
    def release_command(self) -> list[Any]:
        """What gives it back, to be sent behind other commands."""
        return claim_command(self._namespace, self._owner, 0)

    @property
    def granted(self) -> bool:
        """Whether the server granted it."""
        return self._thread is not None

    def start(self) -> None:
        """It was granted: renew it."""
        args = (self._ask, self._done, self.holder, self.command, self.release_command)
        self._thread = threading.Thread(target=_renew, args=args, name="pion lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew it no more; returns when no renewal is under way."""
        self._done.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # its start was interrupted
                thread.join()


def _renew(
    ask: Callable[[list[Any]], Any], done: threading.Event, holder: Holder, command: list[Any], release: list[Any]
) -> None:
    """The thread of a claim. It refers to no claim, so that it cannot be what keeps one alive."""
    while not done.wait(_RENEW):
        gone = not holder.active
        with contextlib.suppress(OSError, PionError):  # the server is away: the lease ends, or is there again with it
            ask(release if gone else command)
        if gone:
            holder.leave()
            return
