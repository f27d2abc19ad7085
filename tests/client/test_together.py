"""Many who want the same prefix: one computes it and the others wait, in a process and among processes."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pion import PionPromptCache
from pion.client import flights, progress
from pion.client.caches import prefill
from pion.testing import server as start_server
from tests.support import families, models
from tests.support.proxy import proxy

models.need_mlx()
mx = models.mx

SUFFIX = [5, 6, 7]
_names = itertools.count()


@pytest.fixture
def ns() -> str:
    return f"together-{next(_names)}"


@pytest.fixture
def ids(ns: str) -> list[int]:
    """Of each test its own: what others stored under another name would be found by its tokens."""
    return tokens_of(ns)


def tokens_of(ns: str) -> list[int]:
    return families.tokens(60, int(ns.rpartition("-")[2]) + 1000)


class Gate:
    """Holds a model's prefill, and counts the tokens it computes."""

    def __init__(self, model: Any) -> None:
        self.model, self.entered, self.open = model, threading.Event(), threading.Event()
        self.seen: list[int] = []
        kind = type(model)
        gate = self

        def call(self: Any, tokens: Any, *args: Any, **options: Any) -> Any:
            if tokens.shape[-1] > 1:
                gate.seen.append(tokens.shape[-1])
                gate.entered.set()
                assert gate.open.wait(60)
            return kind.__call__(self, tokens, *args, **options)

        model.__class__ = type("Gated", (kind,), {"__call__": call})


def wait_for(what: Callable[[], Any]) -> Any:
    """What it gives, once it is true."""
    deadline = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def run_all(count: int, do: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=do, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


# --- in one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objects", [1, 4])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("family", ["llama", "jamba"])
def test_threads_that_want_the_same_cold_prefix_compute_it_once(
    server: Any, ns: str, ids: list[int], family: str, objects: int, background: bool
) -> None:
    gate = Gate(families.tiny(family))
    gate.open.set()
    options = {"vquant": "native", "port": server.port, "background_store": background}
    caches = [PionPromptCache(gate.model, **options) for _ in range(objects)]
    gate.open.clear()
    del gate.seen[:]
    found: dict[int, list[Any]] = {}

    def ask(number: int) -> None:
        found[number] = caches[number % objects].get_or_prefill(ids, ns)

    threads = run_all(4, ask)
    wait_for(lambda: sum(pc.waits for pc in caches) == 3)
    gate.open.set()
    for thread in threads:
        thread.join()
    assert gate.seen == [len(ids)]
    assert (sum(pc.misses for pc in caches), sum(pc.hits for pc in caches)) == (1, 3)
    answers = {families.logits(gate.model, cache, SUFFIX).tobytes() for cache in found.values()}
    assert len(answers) == 1
    for pc in caches:
        pc.close()
    assert not flights._turns


def test_a_prefill_that_fails_lets_the_others_compute(server: Any, ns: str, ids: list[int]) -> None:
    model = families.tiny("llama")
    kind, failed = type(model), threading.Event()

    def call(self: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        if not failed.is_set() and tokens.shape[-1] > 1:
            wait_for(lambda: pc.waits == 2)
            failed.set()
            raise RuntimeError("out of memory")
        return kind.__call__(self, tokens, *args, **options)

    with PionPromptCache(model, vquant="native", port=server.port) as pc:
        model.__class__ = type("Failing", (kind,), {"__call__": call})
        errors: list[BaseException] = []
        found: list[Any] = []

        def ask(_number: int) -> None:
            try:
                found.append(pc.get_or_prefill(ids, ns))
            except RuntimeError as error:
                errors.append(error)

        for thread in run_all(3, ask):
            thread.join()
        assert [str(error) for error in errors] == ["out of memory"]
        assert len(found) == 2
        assert b"lease_ms:0" in pc.resp.call("KV.PREFIX.INFO", ns), "and the lease was given back"


def test_without_a_server_nobody_waits_for_long(ns: str, ids: list[int]) -> None:
    model = families.tiny("llama")
    pc = PionPromptCache(model, port=1, timeout=1)
    found: list[Any] = []
    for thread in run_all(4, lambda _number: found.append(pc.get_or_prefill(ids, ns))):
        thread.join()
    assert (len(found), pc.misses, pc.waits) == (4, 4, 0)


def test_a_forked_child_is_not_held_by_its_parent_s_turn(server: Any, ns: str, ids: list[int]) -> None:
    """The parent computes while it forks; the child, which has no such thread, computes for itself."""
    gate = Gate(families.tiny("llama"))
    gate.open.set()
    with PionPromptCache(gate.model, vquant="native", port=server.port, wait=0.2) as pc:
        gate.open.clear()
        (thread,) = run_all(1, lambda _number: pc.get_or_prefill(ids, ns))
        wait_for(lambda: flights._turns)
        held = next(iter(flights._turns))
        with pc._counting, pc._link._lock:  # as another thread may
            pid = os.fork()
        if pid == 0:
            pc.stats()
            pc._link.came_back()
            ours = flights.begin(held)[1]
            answered = pc.resp.call("PING") == b"+PONG\r\n"
            os._exit(0 if ours and answered and not pc.lookup(ns) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gate.open.set()
        thread.join()
        assert pc.lookup(ns) is True


# --- among processes --------------------------------------------------------------------------------------------------

OTHER = """
import json, sys, threading, time
from tests.support import families
from pion import PionPromptCache
port, ns, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
model = families.tiny("llama")
kind = type(model)
def call(self, tokens, *args, **options):
    if tokens.shape[-1] > 1:
        print("computing", flush=True)
        if mode == "hold":
            sys.stdin.readline()
    return kind.__call__(self, tokens, *args, **options)
with PionPromptCache(model, vquant="native", port=port) as pc:
    model.__class__ = type("Slow", (kind,), {"__call__": call})
    pc.get_or_prefill(families.tokens(60, int(sys.argv[4])), ns)
    print(json.dumps(pc.stats()), flush=True)
"""


def another_process(server: Any, ns: str, mode: str = "hold") -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    command = [sys.executable, "-c", OTHER, str(server.port), ns, mode, str(int(ns.rpartition("-")[2]) + 1000)]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_second_process_waits_for_the_first(server: Any, ns: str, ids: list[int]) -> None:
    first = another_process(server, ns)
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "computing\n"
    gate = Gate(families.tiny("llama"))
    gate.open.set()
    with PionPromptCache(gate.model, vquant="native", port=server.port) as pc:
        del gate.seen[:]
        found: list[Any] = []
        (thread,) = run_all(1, lambda _number: found.append(pc.get_or_prefill(ids, ns)))
        wait_for(lambda: pc.waits)
        assert gate.seen == []
        first.stdin.write("go\n")
        first.stdin.flush()
        thread.join(60)
        said = json.loads(first.stdout.readline())
        assert first.wait(60) == 0
        assert (said["misses"], pc.hits, pc.misses, gate.seen) == (1, 1, 0, [])
        assert b"lease_ms:0" in pc.resp.call("KV.PREFIX.INFO", ns)
        cold = prefill(families.tiny("llama"), ids, None)
        assert (
            families.logits(gate.model, found[0], SUFFIX).tobytes()
            == families.logits(gate.model, cold, SUFFIX).tobytes()
        )
    first.stdout.close()
    first.stdin.close()


def test_a_second_process_computes_when_the_first_dies(
    server: Any, ns: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = "somebody who is dead"
    gate = Gate(families.tiny("llama"))
    gate.open.set()
    with PionPromptCache(gate.model, vquant="native", port=server.port) as pc:
        del gate.seen[:]
        assert pc.resp.call(*flights.claim_command(ns, owner, 700)) == b":1\r\n"  # and is never renewed
        started = time.monotonic()
        pc.get_or_prefill(ids, ns)
        assert time.monotonic() - started >= 0.6
        assert (pc.waits, pc.misses, gate.seen, pc.lookup(ns)) == (1, 1, [len(ids)], True)


def test_waiting_is_bounded(server: Any, ns: str, ids: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with PionPromptCache(families.tiny("llama"), vquant="native", port=server.port, wait=0.3) as pc:
        assert pc.resp.call(*flights.claim_command(ns, "somebody slow", 60_000)) == b":1\r\n"
        started = time.monotonic()
        pc.get_or_prefill(ids, ns)
        assert 0.3 <= time.monotonic() - started < 30
        assert (pc.waits, pc.misses) == (1, 1)
        assert "another process has computed it for 0.3 s" in caplog.text


def test_a_lease_is_renewed_while_the_prefix_is_computed(
    server: Any, ns: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "LEASE_MS", 600)
    monkeypatch.setattr(flights, "_RENEW", 0.2)
    gate = Gate(families.tiny("llama"))
    gate.open.set()
    with PionPromptCache(gate.model, vquant="native", port=server.port) as pc:
        gate.open.clear()
        gate.entered.clear()
        (thread,) = run_all(1, lambda _number: pc.get_or_prefill(ids, ns))
        assert gate.entered.wait(60)
        started = time.monotonic()
        while time.monotonic() - started < 1.5:  # longer than a lease
            assert pc.resp.call(*flights.claim_command(ns, "another", 1)) == b":0\r\n"
            time.sleep(0.02)
        gate.open.set()
        thread.join()
        assert b"lease_ms:0" in pc.resp.call("KV.PREFIX.INFO", ns)
        assert pc.lookup(ns) is True


# --- a server that dies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["LOOKUP", "MATCH", "LEASE", "REGISTER", "STOREBATCH", "STATE", "V.FETCH", "LANE", "SSM.PREFIX.FETCH"]
)
@pytest.mark.parametrize("family", ["llama", "jamba"])
def test_b7_killed_at_any_moment_the_caller_gets_a_right_cache_and_the_log_one_line(
    tmp_path: Path, ns: str, ids: list[int], family: str, command: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "pion.client")
    if command == "V.FETCH":
        monkeypatch.setenv("PION_LANE", "tcp")
    model = families.tiny(family)
    cold = prefill(model, ids, None)
    want = families.logits(model, cold, SUFFIX).tobytes()
    stored = command in ("V.FETCH", "LANE", "SSM.PREFIX.FETCH")
    word = {"STATE": b"SSM.PREFIX.STORE"}.get(command, command.encode())
    with start_server("--kvcache", dir=tmp_path) as server, proxy(server.port) as between:
        if stored:
            with PionPromptCache(model, vquant="native", port=server.port) as pc:
                pc.get_or_prefill(ids, ns)
        killed = []

        def kill(request: bytes) -> None:
            if word in request and not killed:
                killed.append(word)
                server.kill()

        between.before, between.piece = kill, 2000
        with PionPromptCache(model, vquant="native", port=between.port, timeout=20) as pc:
            cache = pc.get_or_prefill(ids, ns)
            assert killed
            assert families.logits(model, cache, SUFFIX).tobytes() == want
            assert [record.levelname for record in caplog.records if "cannot be used" in record.getMessage()] == [
                "WARNING"
            ]
            assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
            assert not flights._turns
            server.restart()
            cache = pc.get_or_prefill(ids, ns)
            assert families.logits(model, cache, SUFFIX).tobytes() == want
            assert pc.lookup(ns, ids) is True


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_told_after_each_pass(server: Any, ns: str, ids: list[int]) -> None:
    told: list[tuple[int, int]] = []
    model = families.tiny("jamba")
    options = {"vquant": "native", "port": server.port, "progress": lambda done, total: told.append((done, total))}
    with PionPromptCache(model, prefill_chunk_size=25, **options) as pc:
        pc.get_or_prefill(ids, ns, checkpoints=[40])
        assert told == [(0, 60), (25, 60), (40, 60), (60, 60)]
        del told[:]
        pc.get_or_prefill(ids, ns)
        assert told == []
        pc.get_or_prefill([*ids, 1, 2, 3], f"{ns}-2")
        assert told == [(60, 63), (63, 63)]


def test_a_bar_is_shown_only_for_long_prefills_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bar:
        made: list[Bar] = []  # noqa: RUF012

        def __init__(self, total: int, initial: int, **_options: Any) -> None:
            self.total, self.n = total, initial
            Bar.made.append(self)

        def update(self, more: int) -> None:
            self.n += more

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_exc: object) -> None: ...

    fake = type(sys)("tqdm")
    fake.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", fake)

    def prefill_of(total: int) -> None:
        with progress.shown(None, 0, total) as told:
            for done in range(500, total + 1, 500):
                if told is not None:
                    told(done, total)

    prefill_of(4000)
    assert Bar.made == [], "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    prefill_of(1000)
    assert Bar.made == [], "not long"
    prefill_of(4000)
    assert [(bar.n, bar.total) for bar in Bar.made] == [(4000, 4000)]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    prefill_of(4000)
    assert len(Bar.made) == 1, "not installed"
