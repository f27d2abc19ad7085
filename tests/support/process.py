"""A server process that is killed and started again on the same directory."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

START_TIMEOUT = 30.0
READY = re.compile(r"Ready to accept connections on 127\.0\.0\.1:(\d+)")


class Process:
    """`python -m pion.cli --kvcache` on a free port of 127.0.0.1.

    Args:
        directory: the data directory.
        flags: further options; `-kvcache` leaves `--kvcache` out.

    Attributes:
        port: of the running server.
        lines: what it wrote so far, all starts together.
    """

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        plain = "-kvcache" in flags
        self.flags = [*([] if plain else ["--kvcache"]), *(flag for flag in flags if flag != "-kvcache")]
        self.port = 0
        self.lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Process:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def start(self) -> None:
        """Starts it and waits for its ready line; an exit before that raises with what it said."""
        argv = [sys.executable, "-u", "-m", "pion.cli", "--port", "0", "--dir", str(self.directory), *self.flags]
        self._ready.clear()
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if not self._ready.wait(START_TIMEOUT) or self.port == 0:
            self.kill()
            raise RuntimeError(f"the server did not start:\n{self.output[-4000:]}")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.port = 0
        for line in process.stdout:
            self.lines.append(line)
            if found := READY.search(line):
                self.port = int(found[1])
                self._ready.set()
        self._ready.set()

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM, and waits; returns the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, sig: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(sig)
        status = self._process.wait(START_TIMEOUT)
        assert self._reader is not None
        self._reader.join(START_TIMEOUT)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def restart(self) -> None:
        """SIGKILL and a new start on the same directory."""
        self.kill()
        self.start()

    def anonymous(self) -> int:
        """Bytes of anonymous memory (RssAnon), Linux only."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
