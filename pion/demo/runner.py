"""The demo in three acts, each in a process of its own that loads the model anew.

    A   nobody knows the system prompt: compute its K/V, store it, answer
    B   another process: fetch it, answer
    C   the server was killed (SIGKILL) and started again: fetch it, answer

The answers must be equal token for token, B and C must compute nothing of the prefix, and fetching must be at least
20 times faster than computing; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

from pion import testing

__all__ = ["main"]

RATIO_BAR: Final = 20
_ACTS: Final = (
    ("A", "computed and stored", "nobody knows the system prompt yet"),
    ("B", "fetched", "another process, the same server"),
    ("C", "fetched", "the server was killed and restarted"),
)


class _BrokenError(Exception):
    """A process of the play failed; the text says which and what it said."""


@dataclass
class _Stage:
    """Where the play happens, and its clock."""

    folder: str
    patience: float

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)


def _lines(stream: IO[str]) -> queue.Queue[str | None]:
    """The lines of a pipe as they come, then None."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


@contextlib.contextmanager
def _process(stage: _Stage, what: str, *command: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A child process and its lines of output. A child that writes nothing for too long is an error."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert child.stdout is not None
        found = _lines(child.stdout)

        def lines() -> Iterator[str]:
            while True:
                try:
                    line = found.get(timeout=stage.patience)
                except queue.Empty:
                    raise _BrokenError(f"{what} said nothing for {stage.patience:g} s") from None
                if line is None:
                    return
                yield line

        try:
            yield child, lines()
        except _BrokenError as error:
            errors.seek(0)
            raise _BrokenError(f"{error}\n{errors.read()[-4000:]}".rstrip()) from None
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            child.stdout.close()


def _act(stage: _Stage, name: str, why: str, arguments: list[str]) -> dict[str, Any]:
    """Run one client process and return its result."""
    stage.say(f"process {name}     {why}")
    with _process(stage, f"process {name}", "pion.demo.worker", *arguments) as (child, lines):
        for line in lines:
            fact = json.loads(line)
            if fact["step"] == "slow":
                stage.say(f"              slow: {fact['reason']}")
            elif fact["step"] == "model":
                stage.say(f"              model loaded; the prefix has {fact['prefix']:,} tokens")
            elif fact["step"] == "prefix":
                verb = "HIT, K/V fetched" if fact["hit"] else "MISS, K/V computed and stored"
                stage.say(f"              {verb} in {fact['milliseconds']:,.0f} ms; answering")
            elif fact["step"] == "done":
                stage.say(f"              {fact['answer']!r}")
                return dict(fact)
        raise _BrokenError(f"process {name} ended with status {child.wait()} and no result")


def _play(stage: _Stage, arguments: list[str]) -> list[dict[str, Any]]:
    folder = os.path.join(stage.folder, "data")
    with testing.server("--kvcache", dir=folder) as server:
        stage.say(f"server        ready on port {server.port}, data in {folder}")
        url = ["--url", f"pion://127.0.0.1:{server.port}", *arguments]
        results = [_act(stage, name, why, url) for name, _, why in _ACTS[:2]]
        server.kill()
        stage.say("server        killed with SIGKILL")
        server.restart()
        stage.say("server        started again on the same data")
        name, _, why = _ACTS[2]
        return [*results, _act(stage, name, why, url)]


def _judge(results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the results; empty when the demo shows what it promises."""
    cold, *warm = results
    faults = []
    if cold["hit"] or not cold["stored"]:
        faults.append("A did not compute and store the prefix")
    for (name, *_), result in zip(_ACTS[1:], warm, strict=True):
        if not result["hit"] or result["prefill_ms"]:
            faults.append(f"{name} computed the prefix instead of fetching it")
        if result["tokens"] != cold["tokens"]:
            faults.append(f"the answer of {name} differs from that of A")
        if result["load_ms"] * RATIO_BAR > cold["prefill_ms"]:
            faults.append(f"{name} was not {RATIO_BAR} times faster than computing")
    return faults


def _table(results: list[dict[str, Any]]) -> str:
    cold = results[0]
    lines = [f"{'':2} {'K/V of the prefix':<20} {'time':>10} {'first token':>12} {'cold/warm':>10}"]
    for (name, verb, _), result in zip(_ACTS, results, strict=True):
        took = result["load_ms"] if result["hit"] else result["prefill_ms"]
        ratio = f"{cold['prefill_ms'] / took:9,.0f}x" if result["hit"] else ""
        lines.append(f"{name:2} {verb:<20} {took:7,.0f} ms {result['first_ms']:9,.0f} ms {ratio:>10}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0 when it shows what it promises, 1 when it does not, 2 when it could not run.
    """
    parser = argparse.ArgumentParser(prog="pion demo", description="A real model on a prefix another process computed.")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object at the end")
    parser.add_argument("--keep", metavar="DIR", help="use this data directory and keep it")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help="of the weights")
    parser.add_argument("--tokens", type=int, default=41, help="longest answer (default 41: the model goes on)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a process may say nothing (default 300)")
    options = parser.parse_args(argv)

    from pion.demo import smollm2

    try:
        smollm2.gguf_path()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    stage = _Stage(options.keep or tempfile.mkdtemp(prefix="pion-demo-"), options.patience)
    try:
        results = _play(stage, ["--dtype", options.dtype, "--tokens", str(options.tokens)])
    except (_BrokenError, RuntimeError, TimeoutError) as error:
        print(f"pion demo: {error}", file=sys.stderr)
        return 2
    finally:
        if not options.keep:
            shutil.rmtree(stage.folder, ignore_errors=True)
    faults = _judge(results)
    print(f"\n{_table(results)}\n")
    print(f"{results[0]['bytes'] / 1e6:.0f} MB of K/V; the answers are " + ("equal." if not faults else "checked:"))
    for fault in faults:
        print(f"FAILED: {fault}")
    if options.json:
        print(json.dumps({"ok": not faults, "faults": faults, "acts": results}))
    return 1 if faults else 0
