"""The server as a prompt cache meets it: there, away, or back again."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, TypeVar

from pion.client.address import Address
from pion.client.connection import Steps
from pion.client.pool import Pool

__all__ = ["Link"]

log = logging.getLogger("pion.client")

_LONGEST_PAUSE: Final = 30.0  # seconds in which a server that did not answer is not asked again
T = TypeVar("T")


class Link:
    """A pool, and whether what it leads to can be used. An outage is said once, and its end.

    Attributes:
        outages: times the server was not there when it was needed.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.pool = Pool(address, 4)
        self.outages = 0
        self._lock = threading.Lock()
        self._down = False
        self._pause_until = 0.0

    def after_fork(self) -> None:
        """In a forked child: a lock that was held is the parent's. The pool looks after itself."""
        self._lock = threading.Lock()

    def run(self, steps: Steps[T]) -> T:
        """Run a procedure on one connection.

        Raises:
            ConnectionLostError: the server is away, or what answers there is none.
        """
        return self.pool.run(steps, self.address.timeout)

    def paused(self) -> bool:
        """Whether the server was away a moment ago, so that asking it is not worth its time; counts as an outage."""
        if time.monotonic() >= self._pause_until:
            return False
        self.outages += 1
        return True

    def pause(self, seconds: float) -> None:
        """A question took so long to fail. A refused connection costs nothing and is tried each time; a silent host
        costs at most a third of the time."""
        self._pause_until = time.monotonic() + min(_LONGEST_PAUSE, 2 * seconds)

    def went_down(self, error: BaseException, what: str = "prefixes are computed locally until it can") -> bool:
        """Note an outage; whether it was said, which is done once."""
        with self._lock:
            self.outages += 1
            first, self._down = not self._down, True
        if first:
            log.warning("%s cannot be used (%s); %s", self.address, error, what)
        return first

    def came_back(self) -> None:
        """Note that the server answered."""
        with self._lock:
            back, self._down = self._down, False
        if back:
            log.warning("%s can be used again", self.address)

    def close(self) -> None:
        """Close the connections."""
        self.pool.close()
