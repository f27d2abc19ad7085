"""A server process that is killed and started again on the same directory."""

from __future__ import annotations

import os
from pathlib import Path

from pion import testing


class Process:
    """A `pion-server --kvcache` on a free port of 127.0.0.1, with a data directory.

    Args:
        directory: the data directory.
        flags: further options; `-kvcache` leaves `--kvcache` out.
        env: beside the environment of the tests.
    """

    def __init__(self, directory: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.directory, self.env = directory, env
        plain = "-kvcache" in flags
        self.flags = [*([] if plain else ["--kvcache"]), *(flag for flag in flags if flag != "-kvcache")]
        self._server: testing.Server | None = None

    def __enter__(self) -> Process:
        if self._server is None:
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._server is not None:
            self.kill()

    def start(self) -> None:
        """Starts it and waits until it is ready; RuntimeError, with what it said, when it ends before."""
        where = [] if "--memory-only" in self.flags else ["--dir", os.fspath(self.directory)]
        self._server = testing.Server(["--port", "0", *where, *self.flags], env=self.env)

    @property
    def _running(self) -> testing.Server:
        assert self._server is not None, "not started"
        return self._server

    @property
    def port(self) -> int:
        return self._running.port

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def output(self) -> str:
        """What the running server has said since its start."""
        return self._running.output

    def anonymous(self) -> int:
        """Bytes of anonymous memory."""
        return self._running.anonymous_bytes()

    def kill(self) -> None:
        """SIGKILL."""
        server, self._server = self._running, None
        server.kill()

    def terminate(self) -> None:
        """SIGTERM, and the graceful end it asks for."""
        server, self._server = self._running, None
        assert server.stop() == 0

    def restart(self) -> None:
        """SIGKILL and a new start on the same directory."""
        self.kill()
        self.start()
