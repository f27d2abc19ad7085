"""The clients against the real server: arrays in, the same arrays out, also after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from pion.client.async_ import AsyncClient
from pion.client.errors import IncompleteError, PrefixMissError
from pion.client.sync import Client
from pion.errors import ArgumentError, AuthenticationError, CommandError, MismatchError, PionError
from pion.testing import Server
from pion.testing import server as start_server

L, H, N, D = 4, 2, 37, 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(host=server.host, port=server.port, timeout=30) as client:
        client.call("KV.PREFIX.FLUSH")
        client.call("FLUSHALL")
        yield client


def words(kind: Any, seed: int, shape: tuple[int, ...] = (L, H, N, D)) -> Any:
    """Random bit patterns, NaN and infinities among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8)
    return raw.view(kind)[..., 0]


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)))


@pytest.mark.parametrize("given", [False, True])
def test_large_bf16_layers_arrive_in_their_place_behind_a_header(client: Client, given: bool) -> None:
    """Long enough for sendfile: each answer is a header from memory and 1 MiB from the file."""
    k, v = words(np.uint16, 4, (3, 8, 1024, 64)), words(np.uint16, 5, (3, 8, 1024, 64))
    client.store("ns", k, v, dtype="bfloat16")
    out = tuple(np.empty((3, 1024, 8, 64), np.uint16).transpose(0, 2, 1, 3) for _ in range(2)) if given else None
    got = client.fetch("ns", out=out, dtype="bfloat16")  # type: ignore[arg-type]
    assert got.dtype == "bfloat16"
    assert same_bits(got.k, k)
    assert same_bits(got.v, v)
    if out is not None:
        assert got.k is out[0]


@pytest.mark.parametrize("vquant", ["int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2"])
def test_quantized_formats_come_back_close_as_float32(client: Client, vquant: str) -> None:
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((L, H, 150, D)).astype(np.float16) for _ in range(2))
    client.store("ns", k, v, vquant=vquant, digest="ab" * 32, rope=1e4)
    got = client.fetch("ns", digest="ab" * 32)
    assert got.dtype == "float32"
    bound = {"int8": 0.01, "fp8": 0.05, "mlx4g32": 0.15, "turbo4": 0.15, "turbo3": 0.25, "turbo2": 0.5}[vquant]
    for sent, received in ((k, got.k), (v, got.v)):
        assert received.shape == sent.shape
        assert np.linalg.norm(received - sent) / np.linalg.norm(sent) < bound
    out = (np.empty_like(got.k), np.empty_like(got.v))
    client.fetch("ns", digest="ab" * 32, out=out)
    assert same_bits(out[0], got.k)
    assert same_bits(out[1], got.v)
    with pytest.raises(MismatchError):  # case C11: never a reinterpretation
        client.store("ns", k, v, vquant="fp16", digest="ab" * 32, rope=1e4)
    with pytest.raises(MismatchError):
        client.fetch("ns", out=(np.empty_like(k), np.empty_like(v)))


@pytest.mark.parametrize(
    ("name", "kind", "vquant"),
    [
        ("float16", np.float16, "native"),
        ("float16", np.float16, "fp16"),
        ("float32", np.float32, "native"),
        ("bfloat16", np.uint16, "native"),
        ("bfloat16", np.uint16, "fp16"),
    ],
)
def test_kept_formats_give_every_word_back(client: Client, name: str, kind: Any, vquant: str) -> None:
    k, v = words(kind, 1), words(kind, 2)
    client.store("ns", k, v, dtype=name, vquant=vquant, digest="ab" * 32, rope=1e4)
    got = client.fetch("ns", digest="ab" * 32)
    assert got.dtype == name
    assert same_bits(got.k, k)
    assert same_bits(got.v, v)
    out = (np.zeros_like(k), np.zeros((L, N, H, D), kind).transpose(0, 2, 1, 3))
    client.fetch("ns", out=out, dtype=name)
    assert same_bits(out[0], k)
    assert same_bits(out[1], v)


def test_rounded_formats_come_back_close(client: Client) -> None:
    k = np.random.default_rng(3).normal(size=(L, H, N, D)).astype(np.float32)
    client.store("half", k, k, vquant="fp16")
    half = client.fetch("half")
    assert half.dtype == "float16"
    assert same_bits(half.k, k.astype(np.float16))
    for kind in (np.float32, np.float16):
        client.store("int8", k.astype(kind), k.astype(kind), vquant="int8", replace=True)
        got = client.fetch("int8")
        assert got.dtype == "float32"
        rows = k.transpose(0, 2, 1, 3).reshape(-1, 32)
        step = np.max(rows.max(axis=1) - rows.min(axis=1)) / 255
        assert np.abs(got.k - k).max() < step


def test_c9_values_a_format_cannot_hold_are_refused_and_nothing_is_served(client: Client) -> None:
    k = np.ones((L, H, N, D), np.float32)
    k[2, 1, 5, 7] = 1e5
    for vquant in ("fp16", "int8"):
        with pytest.raises(CommandError):
            client.store("big", k, k, vquant=vquant, replace=True)
        assert not client.lookup("big")
    big = (k.view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(CommandError):
        client.store("big", big, big, dtype="bfloat16", vquant="int8", replace=True)
    client.store("big", big, big, dtype="bfloat16", replace=True)
    assert same_bits(client.fetch("big").k, big)


def test_another_digest_is_a_mismatch_and_replace_replaces(client: Client) -> None:
    k, other = words(np.float16, 1), words(np.float16, 2)
    client.store("ns", k, k, digest="aa")
    for refused in (
        lambda: client.fetch("ns", digest="bb"),
        lambda: client.lookup("ns", digest="bb"),
        lambda: client.store("ns", other, other, digest="bb"),
    ):
        with pytest.raises(MismatchError):
            refused()
    assert same_bits(client.fetch("ns", digest="aa").k, k)
    client.store("ns", other, other, digest="bb", replace=True)
    assert same_bits(client.fetch("ns", digest="bb").k, other)


def test_lookup_drop_commit_save_stats(client: Client) -> None:
    k = words(np.float16, 1)
    before = client.stats()
    assert not client.lookup("ns")
    client.store("ns", k, k, prefill_ms=1500)
    client.store("ns2", k, k)
    assert client.lookup("ns", tokens=N, prefill_ms=1500)
    client.commit()
    client.save()
    after = client.stats()
    assert after["kvprefix_hits"] == before["kvprefix_hits"] + 1
    assert after["kvprefix_misses"] == before["kvprefix_misses"] + 1
    assert after["prefill_seconds_avoided"] - before["prefill_seconds_avoided"] == pytest.approx(1.5)
    assert client.drop("ns", "ns2", "ns3") == 2
    assert client.drop() == 0
    with pytest.raises(PrefixMissError, match="'ns': dropped"):
        client.fetch("ns")


def test_resp2_gives_the_same(server: Server, client: Client) -> None:
    k = words(np.float16, 1)
    with Client(host=server.host, port=server.port, protocol=2) as old:
        old.store("ns", k, k)
        assert same_bits(old.fetch("ns").v, k)
        assert old.stats().keys() == client.stats().keys()
        assert old.call("GET", "none") is None


async def test_the_trio_client_stores_and_fetches(server: Server, client: Client) -> None:
    k, v = words(np.float16, 1, (6, 8, 700, 64)), words(np.float16, 2, (6, 8, 700, 64))
    async with AsyncClient(host=server.host, port=server.port) as mine:
        await mine.store("ns", k, v)
        assert await mine.lookup("ns")
        got = await mine.fetch("ns")
        assert same_bits(got.k, k)
        assert same_bits(got.v, v)
        await mine.commit()
        assert (await mine.stats())["kvprefix_hits"] >= 2
        assert await mine.drop("ns") == 1


async def test_a13_a_cancelled_fetch_never_answers_the_next_call(server: Server, client: Client) -> None:
    k = words(np.float16, 1, (8, 8, 1000, 64))
    client.store("ns", k, k)
    async with AsyncClient(host=server.host, port=server.port, max_connections=1) as mine:
        await mine.call("SET", "bar", "bar's value")
        cancelled = 0
        for after in (0, 0.0005, 0.001, 0.002, 0.004):
            with trio.move_on_after(after) as scope:
                await mine.fetch("ns")
            cancelled += scope.cancelled_caught
            assert await mine.call("GET", "bar") == b"bar's value"
            assert await mine.ping()
        assert cancelled
        assert same_bits((await mine.fetch("ns")).v, k)


def test_a12_fetch_and_store_in_one_pipeline(client: Client) -> None:
    rows, dim = 4000, 2048
    blob = os.urandom(rows * dim * 2)
    client.call("V.CREATE", "one", dim, "VQUANT", "fp16")
    client.call("V.CREATE", "two", dim, "VQUANT", "fp16")
    client.call("V.STOREBATCH", "one", 0, 0, rows, blob, "FMT", "F16")
    fetch = ["V.FETCH", "one", 0, "RANGE", 0, rows, "FMT", "NATIVE"]
    store = ["V.STOREBATCH", "two", 0, 0, rows, blob, "FMT", "F16"]
    replies = client.pipeline([fetch, fetch, store, store, store, store, fetch, ["PING"]])
    assert [reply if isinstance(reply, str) else len(reply) for reply in replies] == [
        *[len(blob)] * 2,
        *["OK"] * 4,
        len(blob),
        "PONG",
    ]
    assert replies[6] == blob


def test_b12_everything_acknowledged_is_there_after_a_crash(tmp_path: Path) -> None:
    arrays = [words(np.float16, seed) for seed in range(6)]
    with (
        start_server("--kvcache", dir=tmp_path) as crashing,
        Client(host=crashing.host, port=crashing.port, timeout=30) as client,
    ):
        for i in range(0, 6, 2):
            client.store(f"ns{i}", arrays[i], arrays[i + 1], digest=f"0{i}")
        client.drop("ns2")
        crashing.kill()
        crashing.restart()
        for i in (0, 4):
            got = client.fetch(f"ns{i}", digest=f"0{i}")
            assert same_bits(got.k, arrays[i])
            assert same_bits(got.v, arrays[i + 1])
        assert not client.lookup("ns2")


def test_a_password_is_needed_and_used() -> None:
    with start_server("--kvcache", "--requirepass", "secret") as guarded:
        with Client(host=guarded.host, port=guarded.port) as client, pytest.raises(AuthenticationError):
            client.ping()
        with Client(f"pion://:secret@{guarded.host}:{guarded.port}") as client:
            assert client.ping()


def test_rows_that_were_never_stored_are_not_fetched_as_zeros(client: Client) -> None:
    """A prefix without a declared shape is a hit however many rows it has."""
    rows = np.ones((10, 64), np.float32).tobytes()
    client.call("KV.PREFIX.REGISTER", "gap", 64, "int8")
    for sid in ("gap_pk", "gap_pv"):
        for start in (0, 20):
            client.call("V.STOREBATCH", sid, 0, start, 10, rows)
    assert client.lookup("gap")
    with pytest.raises(IncompleteError, match="rows are missing"):
        client.fetch("gap", heads=1)


def test_rows_with_a_digest_are_not_overwritten_by_rows_without(client: Client) -> None:
    x = np.ones((2, 1, 4, 32), np.float16)
    client.store("mine", x, x, digest="aa" * 32)
    with pytest.raises(MismatchError, match="is stored with the digest aa"):
        client.store("mine", 2 * x, 2 * x)
    assert client.fetch("mine", digest="aa" * 32).k.max() == 1
    client.store("mine", 2 * x, 2 * x, replace=True)
    assert client.fetch("mine").k.max() == 2
    with pytest.raises(MismatchError):
        client.fetch("mine", digest="aa" * 32)


def test_text_without_utf8_is_refused_by_name_and_spoils_nothing(client: Client) -> None:
    rows = words(np.float16, 1, (1, 1, 2, 8))
    lone = "a\ud800b"
    calls: list[tuple[str, Any]] = [
        ("the namespace", lambda: client.store(lone, rows, rows)),
        ("the namespace", lambda: client.fetch(lone)),
        ("the namespace", lambda: client.lookup(lone)),
        ("the namespace", lambda: client.drop("fine", lone)),
        ("digest", lambda: client.store("ns", rows, rows, digest=lone)),
        ("digest", lambda: client.fetch("ns", digest=lone)),
        ("parent", lambda: client.store("ns", rows, rows, parent=lone)),
        ("scope", lambda: client.store("ns", rows, rows, scope=lone)),
        ("argument 1 of SET", lambda: client.call("SET", lone, b"1")),
        ("argument 2 of SET", lambda: client.pipeline([["PING"], ["SET", "k", lone]])),
        ("the password", lambda: Client(password=lone)),
        ("the client_name", lambda: Client(client_name=lone)),
    ]
    for name, call in calls:
        with pytest.raises(ArgumentError, match=rf"^{name} has no UTF-8: .*lone surrogate") as caught:
            call()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, PionError)
    assert not client.lookup("ns")
    assert client.ping()


def test_the_database_of_a_url_is_used_for_keys_and_prefixes_are_in_none(server: Server, client: Client) -> None:
    rows = words(np.float16, 1, (1, 1, 2, 8))
    with Client(f"pion://{server.host}:{server.port}/7") as other:
        other.call("SET", "key", b"in 7")
        other.store("ns", rows, rows)
    assert client.call("GET", "key") is None
    assert client.lookup("ns")
    with Client(host=server.host, port=server.port, db=7) as again:
        assert again.call("GET", "key") == b"in 7"
    with Client(f"pion://{server.host}:{server.port}/99") as none, pytest.raises(CommandError, match="DB index"):
        none.ping()
