"""`PionPromptCache` when the server is down, killed in the middle, refuses, or changes its mind."""

from __future__ import annotations

import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from pion import Client, PionPromptCache
from pion.client.caches import pack_rows
from pion.errors import AuthenticationError, CommandError
from pion.testing import server as start_server
from tests.support import models
from tests.support.proxy import Proxy

models.need_mlx()

IDS = list(range(60))
_names = itertools.count()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come through the proxy, not out of the server's file."""
    monkeypatch.setenv("PION_LANE", "tcp")


@pytest.fixture
def ns() -> str:
    return f"outage-{next(_names)}"


def words(cache: list[Any]) -> list[bytes]:
    return [pack_rows(array, len(IDS)).tobytes() for layer in cache for array in (layer.keys, layer.values)]


@pytest.fixture(scope="module")
def truth() -> list[bytes]:
    from pion.client.caches import prefill

    return words(prefill(models.tiny_llama(), IDS, None))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_down_then_up_then_killed_then_up(
    tmp_path: Path, ns: str, truth: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with start_server("--kvcache", dir=tmp_path) as server:
        server.kill()
        with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port) as pc:
            for _ in range(3):
                assert words(pc.get_or_prefill(IDS, ns)) == truth
                assert pc.lookup(ns) is False
            assert (pc.outages, pc.misses, pc.hits) == (6, 3, 0)
            assert len(warnings_of(caplog)) == 1, "an outage is said once"
            server.restart()
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert pc.lookup(ns) is True
            assert warnings_of(caplog)[1:] == [f"127.0.0.1:{server.port} can be used again"]
            server.kill()
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            server.restart()
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert pc.hits == 1
            assert len(warnings_of(caplog)) == 4


def test_a_silent_host_costs_at_most_a_third_of_the_time(between: Proxy, ns: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        pc = PionPromptCache(models.tiny_llama(), port=silent.getsockname()[1], timeout=0.3)
        started = time.monotonic()
        calls = 0
        while time.monotonic() - started < 1.5 or calls < 3:
            pc.get_or_prefill(IDS[:2], ns)
            calls += 1
        assert pc.outages == calls > 10


@pytest.mark.usefixtures("over_tcp")
def test_b7_the_server_is_lost_in_the_middle_of_a_fetch(
    server: Any, between: Proxy, ns: str, truth: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port) as owner:
        owner.get_or_prefill(IDS, ns)
    total = 2 * 2 * len(IDS) * 16 * 4
    for limit in (600, 1000, total // 2, total, total + 900):  # in the first layer, in others, behind the rows
        between.limit = limit
        with PionPromptCache(models.tiny_llama(), vquant="native", port=between.port) as pc:
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert (pc.hits, pc.misses, pc.outages) == (0, 1, 1), limit
    between.limit = None
    with PionPromptCache(models.tiny_llama(), vquant="native", port=between.port) as pc:
        assert words(pc.get_or_prefill(IDS, ns)) == truth
        assert pc.hits == 1


def test_b7_a_store_that_broke_off_is_a_miss_and_is_completed(
    server: Any, between: Proxy, ns: str, truth: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    between.request_limit = 6000  # REGISTER and the first rows
    with PionPromptCache(models.tiny_llama(), vquant="native", port=between.port) as pc:
        assert words(pc.get_or_prefill(IDS, ns)) == truth
        assert pc.store_errors == 1
    assert any("was computed but not stored" in text for text in warnings_of(caplog))
    with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port) as pc:
        assert pc.lookup(ns) is False
        assert pc.resp.call("KV.PREFIX.WHY", ns).split(b"\r\n")[1].startswith(b"incomplete")
        assert words(pc.get_or_prefill(IDS, ns)) == truth
        assert words(pc.get_or_prefill(IDS, ns)) == truth
        assert (pc.hits, pc.misses) == (1, 1)


@pytest.mark.usefixtures("over_tcp")
def test_an_entry_replaced_between_lookup_and_fetch_is_not_used(
    server: Any, between: Proxy, ns: str, truth: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port) as owner:
        owner.get_or_prefill(IDS, ns)

        def replace(request: bytes) -> None:
            if b"V.FETCH" in request and between.before is not None:
                between.before = None
                other = PionPromptCache(
                    models.tiny_llama(seed=9), vquant="native", port=server.port, on_mismatch="replace"
                )
                with other:
                    other.get_or_prefill(IDS, ns)

        between.before = replace
        with PionPromptCache(models.tiny_llama(), vquant="native", port=between.port, on_mismatch="recompute") as pc:
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert pc.hits == 0
        assert between.before is None
        assert any("replaced while it was fetched" in text for text in warnings_of(caplog))


@pytest.mark.parametrize("moment", [1, 3])
def test_rows_never_stay_in_an_entry_that_was_replaced_while_they_were_sent(
    server: Any, between: Proxy, ns: str, truth: list[bytes], moment: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two writers of different tokens under one name: neither may leave its rows in the other's entry."""
    seen = [0]
    other = [7, *IDS[1:]]
    with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port, on_mismatch="replace") as rival:

        def replace(request: bytes) -> None:
            seen[0] += b"V.STOREBATCH" in request
            if seen[0] == moment and between.before is not None:
                between.before = None
                rival.get_or_prefill(other, ns)

        between.before, between.piece = replace, 2000
        with PionPromptCache(models.tiny_llama(), vquant="native", port=between.port) as pc:
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert between.before is None
            assert pc.store_errors == 1
            assert any("given to something else" in text for text in warnings_of(caplog))
        assert rival.lookup(ns, other)  # what was acknowledged stays
        kept = words(rival.get_or_prefill(other, ns))
        assert (rival.hits, rival.misses) == (1, 1)
    with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port) as alone:
        assert kept == words(alone.get_or_prefill(other, f"{ns}-alone"))


def test_what_is_computed_is_never_lost_to_an_unfinished_entry_of_something_else(
    server: Any, ns: str, truth: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with PionPromptCache(models.tiny_llama(), vquant="native", port=server.port) as pc:
        begun = ["KV.PREFIX.REGISTER", ns, 16, "fp32", "ROWS", 5, "LAYERS", 2, "DIGEST", "ab" * 32]
        assert pc.resp.call(*begun) == b"+OK\r\n"
        assert words(pc.get_or_prefill(IDS, ns)) == truth
        assert (pc.mismatches, pc.store_errors, pc.lookup(ns)) == (1, 0, False)
        assert any("it is not stored" in text for text in warnings_of(caplog))


@pytest.mark.usefixtures("over_tcp")
def test_an_entry_dropped_between_lookup_and_fetch_is_recomputed_and_stored(
    server: Any, between: Proxy, ns: str, truth: list[bytes]
) -> None:
    with Client(host="127.0.0.1", port=server.port) as client:

        def drop(request: bytes) -> None:
            if b"V.FETCH" in request and between.before is not None:
                between.before = None
                client.drop(ns)

        with PionPromptCache(models.tiny_llama(), vquant="native", port=between.port) as pc:
            pc.get_or_prefill(IDS, ns)
            between.before = drop
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert between.before is None
            assert words(pc.get_or_prefill(IDS, ns)) == truth
            assert (pc.hits, pc.misses) == (1, 2)


# --- values and waiting ----------------------------------------------------------------------------------------------


def loud(dtype: str) -> Any:
    """A model whose keys go beyond what fp16 holds."""
    model = models.tiny_llama(dtype)
    for layer in model.layers:
        layer.self_attn.v_proj.weight = layer.self_attn.v_proj.weight * 1e6
    return model


@pytest.mark.parametrize(("dtype", "vquant"), [("float32", "fp16"), ("float32", "int8"), ("bfloat16", "int8")])
def test_c9_values_a_format_cannot_hold_are_refused_and_never_stored(
    server: Any, ns: str, dtype: str, vquant: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = loud(dtype)
    with PionPromptCache(model, vquant=vquant, port=server.port) as pc:
        cache = pc.get_or_prefill(IDS, ns)
        assert abs(cache[0].values[..., : len(IDS), :]).max().item() > 65504
        assert (pc.store_errors, pc.lookup(ns)) == (1, False)
        assert any("row" in text and "not stored" in text for text in warnings_of(caplog))
    with PionPromptCache(model, vquant="native", port=server.port, on_mismatch="replace") as pc:
        kept = words(pc.get_or_prefill(IDS, ns))
        assert words(pc.get_or_prefill(IDS, ns)) == kept
        assert pc.hits == 1


def test_h1_a_background_store_does_not_delay_the_answer(server: Any, between: Proxy, ns: str) -> None:
    gate = threading.Event()

    def hold_rows(request: bytes) -> None:
        if b"V.STOREBATCH" in request:
            assert gate.wait(60)

    between.before = hold_rows
    with PionPromptCache(models.tiny_llama(), port=between.port, background_store=True) as pc:
        cache = pc.get_or_prefill(IDS, ns)
        assert models.greedy(pc.model, cache, [1], 3)
        with Client(host="127.0.0.1", port=server.port) as client:
            assert client.lookup(ns) is False
        gate.set()
        assert pc.lookup(ns) is True


def test_h1_round_trips(server: Any, between: Proxy, ns: str) -> None:
    with PionPromptCache(models.tiny_llama(num_hidden_layers=6), port=between.port) as pc:
        pc.resp.call("PING")
        before = between.turns
        pc.get_or_prefill(IDS, ns)
        assert between.turns - before <= 4  # lookup, register, rows (whose replies may come in two pieces)
        before = between.turns
        pc.get_or_prefill(IDS, ns)
        assert between.turns - before == 1  # lookup, which offers the file as well
        assert pc.hits == 1


# --- refusals that raise ----------------------------------------------------------------------------------------------


def test_credentials(tmp_path: Path, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PION_PASSWORD", raising=False)
    with start_server("--kvcache", "--requirepass", "p@ss/word", dir=tmp_path) as server:
        model = models.tiny_llama()
        where = {"host": server.host, "port": server.port}
        for options, code in (({}, "NOAUTH"), ({"password": "wrong"}, "WRONGPASS")):
            with PionPromptCache(model, **where, **options) as pc:
                for call in (lambda pc=pc: pc.get_or_prefill(IDS, ns), lambda pc=pc: pc.lookup(ns), pc.commit):
                    with pytest.raises(AuthenticationError, match=f"^{code}"):
                        call()
                assert pc.misses == 0
        for options in (
            {"password": "p@ss/word"},
            {"username": "default", "password": "p@ss/word"},
        ):
            with PionPromptCache(model, **where, **options) as pc:
                assert pc.get_or_prefill(IDS, ns)[0].offset == len(IDS)
        with PionPromptCache(model, url=f"pion://:p%40ss%2Fword@127.0.0.1:{server.port}") as pc:
            assert pc.lookup(ns) is True
        monkeypatch.setenv("PION_PASSWORD", "p@ss/word")
        with PionPromptCache(model, **where) as pc:
            assert pc.lookup(ns) is True


def test_an_untrusted_certificate_raises(byte_server: Callable[..., Any], ns: str) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    port = byte_server(context=context).port
    with PionPromptCache(models.tiny_llama(), port=port, ssl=True) as pc:
        for call in (lambda: pc.get_or_prefill(IDS, ns), lambda: pc.lookup(ns)):
            with pytest.raises(ssl.SSLCertVerificationError):
                call()
        assert (pc.misses, pc.outages) == (0, 0)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with PionPromptCache(port=port, ssl=trusting) as pc:
        assert pc.resp.call("PING") == b"+PONG\r\n"


def test_a_server_without_kvcache_says_so(tmp_path: Path, ns: str) -> None:
    with (
        start_server(dir=tmp_path) as server,
        PionPromptCache(models.tiny_llama(), port=server.port) as pc,
        pytest.raises(CommandError, match="V-store not enabled"),
    ):
        pc.get_or_prefill(IDS, ns)
