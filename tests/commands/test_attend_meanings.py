"""What a name meant before is never answered: prefixes made anew, rows stored over others, rows cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion.commands import Dispatcher
from pion.config import Options
from pion.ref import attention as ref
from pion.store.engine import Engine
from pion.store.store import wall_ms
from tests.support import attend
from tests.support.attention import metal, normal
from tests.support.memory import MemoryClient
from tests.support.process import Process
from tests.support.raw import Raw, ReplyError

ROWS, DIM = 8, 16
K = normal(1, 1, ROWS, DIM)
Q = normal(3, 1, 1, DIM)
SESSIONS = ("p_attn", "mine", "q_attn", "free")


class Client(MemoryClient):
    """Answers texts of simple strings, bytes of bulk strings."""

    def __call__(self, *argv: Any) -> Any:
        got = super().__call__(*argv)
        text = getattr(got, "text", None)
        return text.decode() if text is not None else got

    def prefix(self, ns: str, rows: int = ROWS, vquant: str = "fp16", *more: Any) -> None:
        assert self("KV.PREFIX.REGISTER", ns, DIM, vquant, *more) == "OK"
        for side in ("pk", "pv"):
            self.rows(f"{ns}_{side}", 0, K[0, :rows])

    def rows(self, sid: str, start: int, rows: Any) -> None:
        blob = np.ascontiguousarray(rows, np.float32).tobytes()
        assert self("V.STOREBATCH", sid, 0, start, len(rows), blob) in ("OK", len(rows)), sid

    def hold(self, sid: str, k: Any = K) -> None:
        assert self("ATTEND.PREFIX.STORE", sid, 0, *k.shape, k.tobytes(), k.tobytes()) == "OK"

    def states(self) -> list[str]:
        return [self("ATTEND.PREFIX.LOOKUP", sid, 0) for sid in SESSIONS]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(None, memory_only=True, ticker=False, max_sessions=4) as made:
        yield made


@pytest.fixture
def client(engine: Engine) -> Client:
    """p and q are stored; p is held under its own name and by `mine`, q by its own."""
    made = Client(Dispatcher(engine, Options(kvcache=True)))
    for ns in ("q", "p"):
        made.prefix(ns)
    for sid in ("p_attn", "free"):
        made.hold(sid)
    assert made("KV.PREFIX.WARM", "p", 1, DIM, "mine") == "1"
    assert made("KV.PREFIX.WARM", "q", 1, DIM, "q_attn") == "1"
    assert made.states() == ["HIT"] * 4
    return made


def evict_p(client: Client) -> None:
    client("KV.PREFIX.LOOKUP", "q")
    client.prefix("other")
    assert client("KV.PREFIX.LOOKUP", "p") == "MISS"


def test_an_evicted_prefix_is_answered_until_its_name_means_another(client: Client) -> None:
    evict_p(client)
    assert client.states() == ["HIT"] * 4
    answer = client("ATTEND.PREFIX.QUERY", "mine", 0, 1, DIM, 1, Q.tobytes())
    want = ref.attend(Q.astype(np.float64), K.astype(np.float16), K.astype(np.float16))[0]
    assert np.abs(np.frombuffer(answer, "<f4") - want.ravel()).max() < 1e-6


def register(client: Client) -> None:
    client.prefix("p")


def create(client: Client) -> None:
    client("V.CREATE", "p_pk", DIM, "VQUANT", "fp16")


def schema(client: Client) -> None:
    spec = f"fmt=fp16,dim={DIM}"
    assert client("KV.PREFIX.REGISTER.SCHEMA", "p", 1, spec, spec) == "OK"


@pytest.mark.parametrize("make", [register, create, schema], ids=lambda made: made.__name__)
def test_one_that_is_made_again_ends_what_was_held(client: Client, make: Callable[[Client], None]) -> None:
    evict_p(client)
    make(client)
    assert client.states() == ["MISS", "MISS", "HIT", "HIT"]
    assert b"sdpa_warm_bytes:%d\r\n" % (4 * K.nbytes) in client("ATTEND.PREFIX.INFO")  # of the two that are left


@pytest.mark.parametrize("seconds", [0, 60])
def test_one_whose_time_has_ended(client: Client, engine: Engine, seconds: int) -> None:
    """Nothing of it is kept, as if it had been dropped."""
    assert client("KV.PREFIX.EXPIRE", "p", seconds) == 1
    if seconds:
        assert client.states() == ["HIT"] * 4
        later = wall_ms() + 1000 * seconds
        engine._store.now_ms = lambda: later
        engine.fsync_tick()
    assert client.states() == ["MISS", "MISS", "HIT", "HIT"]


def test_rows_over_others_end_what_was_loaded_of_them(client: Client) -> None:
    """What a client holds under the prefix's name is the client's: it stored both."""
    client.rows("p_pv", ROWS, K[0, :2])  # behind what is held: an answer over the rows of then is still right
    assert client.states() == ["HIT"] * 4
    client.rows("p_pk", ROWS - 1, K[0, :1])
    assert client.states() == ["HIT", "MISS", "HIT", "HIT"]


def test_rows_that_are_cut_off(client: Client) -> None:
    snap = client("V.SNAPSHOT", "p_pk")
    client.rows("p_pk", ROWS, K[0, :2])
    client("V.RESTORE", "p_pk", snap)
    assert client.states() == ["HIT"] * 4  # none of what is held
    client.rows("p_pk", ROWS, K[0, :2])
    client.rows("p_pv", ROWS, K[0, :2])
    assert client("KV.PREFIX.WARM", "p", 1, DIM, "mine") == "1"
    client("V.RESTORE", "p_pk", snap)
    assert client.states() == ["HIT", "MISS", "HIT", "HIT"]


def test_replace_with_the_same_description(client: Client) -> None:
    assert client("KV.PREFIX.REGISTER", "p", DIM, "fp16", "REPLACE") == "OK"
    assert client.states() == ["MISS", "MISS", "HIT", "HIT"]


def test_a_cold_layer_ends_as_well(client: Client) -> None:
    slots = client.dispatcher.server.attention.engine().slots
    slots.warm_slots = 1
    client.hold("free")
    assert client.states() == ["COLD", "COLD", "COLD", "HIT"]
    evict_p(client)
    client.prefix("p")
    assert client.states() == ["MISS", "MISS", "COLD", "HIT"]


def test_a_session_of_two_prefixes_ends_with_either(client: Client) -> None:
    """Layers of the first may be left under those of the second."""
    assert client("KV.PREFIX.WARM", "q", 1, DIM, "mine") == "1"
    client.rows("p_pk", 0, K[0, :1])
    assert client.states() == ["HIT", "MISS", "HIT", "HIT"]


def test_a_session_in_use_is_never_lost_track_of(engine: Engine) -> None:
    options = Options(kvcache=True, attend_warm_slots=2, attend_cold_slots=1)
    client = Client(Dispatcher(engine, options))
    for ns in ("p", "q"):
        client.prefix(ns)
    assert client("KV.PREFIX.WARM", "p", 1, DIM, "mine") == "1"
    for number in range(40):
        assert client("KV.PREFIX.WARM", "q", 1, DIM, f"s{number}") == "1"
        assert len(client("ATTEND.PREFIX.QUERY", "mine", 0, 1, DIM, 1, Q.tobytes())) == 4 * DIM
    sources = client.dispatcher.server.attention._sources
    assert len(sources.all()) <= 4
    client.rows("p_pk", 0, K[0, :1])
    assert client("ATTEND.PREFIX.LOOKUP", "mine", 0) == "MISS"
    client("ATTEND.PREFIX.DROP", *(f"s{number}" for number in range(40)))
    client("KV.PREFIX.FLUSH")
    assert sources.all() == set()


@pytest.mark.parametrize("row", [0, ROWS])
def test_rows_that_change_while_they_are_loaded(client: Client, engine: Engine, row: int) -> None:
    """Between the keys and the values: what was loaded may be of neither state, and nothing of it stays. Rows behind
    what is loaded are no change."""
    read, done = engine.v_read, []

    def reading(*args: Any) -> Any:
        if args[0] == b"p_pv" and not done:
            done.append(True)
            client.rows("p_pk", row, K[0, :1])
        return read(*args)

    engine.v_read = reading  # type: ignore[method-assign]
    assert client("KV.PREFIX.WARM", "p", 1, DIM, "mine") == "1"
    assert done
    assert client("ATTEND.PREFIX.LOOKUP", "mine", 0) == ("MISS" if row == 0 else "HIT")


def test_on_a_real_server_with_large_bodies(tmp_path: Path) -> None:
    """Bodies that stream in; eviction by the number of sessions; the answer is of what is stored now, or none."""
    count, dim = 3000, 128
    first, second = (normal(seed, 1, count, dim).astype(np.float16).astype(np.float32) for seed in (5, 6))
    q = normal(3, 1, 1, dim)
    with Process(tmp_path, "--max-sessions", "4") as process, Raw(process.port) as conn:

        def store(ns: str, k: Any) -> None:
            conn.ok("KV.PREFIX.REGISTER", ns, dim, "fp16")
            for side in ("pk", "pv"):
                conn.ok("V.STOREBATCH", f"{ns}_{side}", 0, 0, count, k.tobytes())

        store("p", first)
        conn.ok("KV.PREFIX.WARM", "p", 1, dim, "mine")
        out = attend.query(conn, "mine", 0, q)
        assert np.abs(out - ref.attend(q.astype(np.float64), first, first)[0]).max() < 2e-6
        conn.ok("V.STOREBATCH", "p_pk", 0, 0, count, second.tobytes())
        assert conn.call("ATTEND.PREFIX.LOOKUP", "mine", 0) == "MISS"
        conn.ok("KV.PREFIX.WARM", "p", 1, dim, "mine")
        assert np.array_equal(attend.query(conn, "mine", 0, first[:, :1]).shape, (1, 1, dim))
        for ns in ("a", "b"):
            store(ns, first)
        assert conn.ok("KV.PREFIX.LOOKUP", "p") == "MISS"
        assert conn.call("ATTEND.PREFIX.LOOKUP", "mine", 0) == "HIT"
        store("p", second)
        assert conn.call("ATTEND.PREFIX.LOOKUP", "mine", 0) == "MISS"


@pytest.mark.parametrize("flags", [(), ("--attend-autowarm", "--attend-warm-slots", "2")], ids=["plain", "autowarm"])
def test_prefixes_that_come_and_go_while_they_are_attended_to(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Drops, evictions and replacements under running queries: an answer is of what the name means, or has meant when
    the query was sent, or there is none."""
    rows, dim = 200, 64
    q = normal(3, 1, 1, dim)
    stored, answers = 0, 0
    wrong: list[Any] = []
    stop = threading.Event()
    with Process(tmp_path, "--max-sessions", "4", *flags) as process, Raw(process.port) as conn:

        def ask() -> None:
            nonlocal answers
            with Raw(process.port, timeout=60) as other:
                while not stop.is_set():
                    oldest = stored
                    out = attend.query(other, "s", 0, q)
                    if isinstance(out, ReplyError):
                        if not str(out).startswith(("COLDMISS", "ERR ATTEND.PREFIX.QUERY failed (session not found")):
                            wrong.append(out)
                        continue
                    answers += 1
                    number = round(float(out.flat[0]))
                    if np.abs(out - number).max() > 1e-3 or number < oldest:
                        wrong.append((oldest, out))

        def store(ns: str, number: int, *more: str) -> None:
            conn.ok("KV.PREFIX.REGISTER", ns, dim, "fp16", *more)
            nonlocal stored
            if ns == "p":
                stored = number
            keys = normal(number, rows, dim)
            conn.ok("V.STOREBATCH", f"{ns}_pk", 0, 0, rows, keys.tobytes())
            conn.ok("V.STOREBATCH", f"{ns}_pv", 0, 0, rows, np.full_like(keys, number).tobytes())

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        number = 0
        while number < 40 or (answers < 40 and not wrong and number < 2000):
            number += 1
            if number % 3 == 0:
                conn.ok("KV.PREFIX.DROP", "p")
            elif number % 3 == 1:
                for ns in ("a", "b"):  # p goes for them
                    store(ns, 1)
            store("p", number, *(["REPLACE"] if number % 3 == 2 else []))
            assert conn.ok("KV.PREFIX.WARM", "p", 1, dim, "s") == "1"
            if flags:
                for sid in ("x", "y"):  # s goes cold
                    conn.ok("KV.PREFIX.WARM", "p", 1, dim, sid)
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert answers >= 40


# --- rows as they are stored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vquant", ["int8", "fp8", "mlx4g32", "turbo4", "turbo2", "fp16"])
def test_warm_holds_stored_rows_where_the_backend_computes_with_them(
    vquant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Metal backend (its kernels' twins): less memory, and the answers of the decoded rows."""
    heads, dim, rows, layers = 2, 32, 150, 2
    answers = {}
    for name in ("metal", "cpu"):
        with Engine(None, memory_only=True, ticker=False) as engine, monkeypatch.context() as patched:
            if name == "metal":
                patched.setattr("pion.attention.engine.make", lambda *_: metal(twins=True))
            client = Client(Dispatcher(engine, Options(kvcache=True, attend_autowarm=True, attend_warm_slots=1)))
            more = ["ROWS", rows, "LAYERS", layers, "HEADS", heads, "HEAD_DIM", dim, "ROPE", 10000]
            assert client("KV.PREFIX.REGISTER", "p", heads * dim, vquant, *more) == "OK"
            for layer in range(layers):
                for number, side in enumerate(("pk", "pv")):
                    flat = normal(10 * layer + number, rows, heads * dim)
                    client("V.STOREBATCH", f"p_{side}", layer, 0, rows, flat.tobytes())
            assert client("KV.PREFIX.WARM", "p", heads, dim, "s") == str(layers)
            q, got = normal(3, heads, dim), []
            for layer in (0, 1, 0):  # each is cold by then: it comes back by itself
                got.append(client("ATTEND.PREFIX.QUERY", "s", layer, heads, dim, 1, q.tobytes()))
                got.append(
                    client("ATTEND.PREFIX.QUERY_SPARSE_AUTO", "s", layer, heads, dim, 16, 2, heads, q.tobytes(), "")
                )
            answers[name] = np.concatenate([np.frombuffer(blob, "<f4") for blob in got])
            figures = client.dispatcher.server.attention.described()
            assert figures["sdpa_rehydrates"] == 3
            plain = 2 * 4 * rows * heads * dim
            held = int(figures["sdpa_warm_bytes"]) - 4 * heads * dim * -(-rows // 16)  # the table of the blocks
            assert held == plain if vquant == "fp16" or name == "cpu" else held < plain / 1.5
    assert np.abs(answers["metal"] - answers["cpu"]).max() < 5e-6
