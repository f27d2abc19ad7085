"""One computes, the others wait: among the threads of a process, and among processes through the server's leases.

Within a process a *turn* belongs to the thread that computes a prefix; those who want the same one wait until it is
over. Between processes a *claim* is a lease that the server grants to one owner while a prefix is not complete; the
owner renews it while it computes. Neither is needed for being right: whoever waited too long, or whose predecessor
died, computes for itself.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final

from pion.errors import PionError

__all__ = ["LEASE_MS", "Claim", "Turn", "begin", "claim_command", "end"]

LEASE_MS: Final = 10_000
_RENEW: Final = LEASE_MS / 1000 / 3

_lock = threading.Lock()
_turns: dict[object, Turn] = {}


class Turn:
    """The computing of one prefix by one thread.

    Attributes:
        over: set when it has ended.
        stored: whether the prefix is on the server then.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.stored = False


def begin(key: object) -> tuple[Turn, bool]:
    """The turn of a prefix, and whether it is the caller's, who must `end` it."""
    with _lock:
        turn = _turns.get(key)
        if turn is not None:
            return turn, False
        turn = _turns[key] = Turn()
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
    """A lease that is renewed in a thread until it is given back.

    Args:
        ask: sends one command and returns its reply.
        namespace: what was granted.
        owner: to whom.
    """

    def __init__(self, ask: Callable[[list[Any]], Any], namespace: str, owner: str) -> None:
        self._ask, self._namespace, self._owner = ask, namespace, owner
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="pion lease", daemon=True)
        self._thread.start()

    @staticmethod
    def new_owner() -> str:
        """A name that nobody else has."""
        return uuid.uuid4().hex

    @property
    def release_command(self) -> list[Any]:
        """What gives it back, to be sent behind other commands."""
        return claim_command(self._namespace, self._owner, 0)

    def _renew(self) -> None:
        while not self._done.wait(_RENEW):
            try:
                self._ask(claim_command(self._namespace, self._owner, LEASE_MS))
            except (OSError, PionError):
                continue  # the server is away: the lease ends by itself, or is there again with it

    def stop(self) -> None:
        """Renew it no more; returns when no renewal is under way."""
        self._done.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
