"""Helpers for tests of Pion and of programs that use it: a real server process on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Server", "server"]

_READY = re.compile(rb"Ready to accept connections on (\S+):(\d+)\s*$")


class Server:
    """A running `pion-server`.

    Attributes:
        host, port: where it listens.
        process: the `subprocess.Popen`.
        args: the command line, for a restart with the same data.
    """

    def __init__(self, args: Sequence[str], *, env: dict[str, str] | None = None, timeout: float = 60.0) -> None:
        self.args = list(args)
        self.env = {**os.environ, **(env or {})}
        self.timeout = timeout
        self.host = ""
        self.port = 0
        self._lines: list[bytes] = []
        self._changed = threading.Condition()
        self._start(self.args)

    def _start(self, args: Sequence[str]) -> None:
        self._lines.clear()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pion.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.env
        )
        # The pipe is read all the time: a server that logs a lot must not block on it.
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        end = time.monotonic() + self.timeout
        with self._changed:
            while True:
                for line in self._lines:
                    if match := _READY.search(line):
                        self.host, self.port = match[1].decode().strip("[]"), int(match[2])
                        return
                if not self._reader.is_alive():
                    status = self._reap(self.process, self._reader)
                    raise RuntimeError(f"the server ended with status {status}:\n{self.output}")
                if (
                    not self._changed.wait(timeout=min(1.0, max(0.0, end - time.monotonic())))
                    and time.monotonic() > end
                ):
                    self.process.kill()
                    break
        self._reap(self.process, self._reader)
        raise TimeoutError(f"the server was not ready after {self.timeout} s:\n{self.output}")

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """What the server has printed so far, standard error included."""
        return b"".join(self._lines).decode("utf-8", "replace")

    def wait_output(self, timeout: float) -> bool:
        """Waits until the server prints another line; False when it did not."""
        with self._changed:
            return self._changed.wait(timeout)

    def anonymous_bytes(self) -> int:
        """RssAnon of the process (Linux)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon in /proc/pid/status")

    def kill(self) -> None:
        """SIGKILL: what a crash or the OOM killer does."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, then wait; returns the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, reader = self.process, self._reader  # another thread may start the next one as soon as this has ended
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise TimeoutError(f"the server did not end on {number.name}:\n{self.output}") from None
        return self._reap(process, reader)

    def _reap(self, process: subprocess.Popen[bytes], reader: threading.Thread) -> int:
        status = process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()
        return status

    def restart(self) -> None:
        """Starts again with the same flags and port after `kill` or `stop`."""
        args = list(self.args)
        if self.port:
            args[args.index("--port") + 1] = str(self.port)
        self._start(args)


@contextlib.contextmanager
def server(
    *flags: str,
    dir: str | Path | None = None,
    port: int = 0,
    env: dict[str, str] | None = None,
    timeout: float = 60.0,
) -> Iterator[Server]:
    """A server of this Python environment on a free port; ended (by its pid) when the block is left.

    Args:
        flags: further command-line flags, e.g. `"--kvcache"`.
        dir: data directory; None, and no `--dir` among the flags, keeps everything in memory.
        port: 0 picks a free one.
        env: further environment variables.
        timeout: seconds to become ready, and to end.

    Raises:
        RuntimeError: the server ended before it was ready; the text holds its output.
    """
    where: list[str] = []
    if dir is not None:
        where = ["--dir", os.fspath(dir)]
    elif not {"--dir", "--memory-only"} & set(flags):
        where = ["--memory-only"]
    process = Server(["--port", str(port), *where, *flags], env=env, timeout=timeout)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.stop()
        else:
            process._end(signal.SIGTERM)
