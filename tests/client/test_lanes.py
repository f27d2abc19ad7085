"""Every way to get a prefix gives the same arrays; which one is taken, and what happens when it cannot be."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import Client
from pion.client import mapped
from pion.client.address import Address
from pion.client.blank import blank_arrays
from pion.client.caches import pack_rows
from pion.client.errors import IncompleteError, LaneError, PrefixMissError
from pion.client.lanes import Lanes
from pion.client.local import LocalCopies
from pion.client.prompt_cache import PionPromptCache
from pion.testing import server as start_server
from tests.support import models
from tests.support.process import Process
from tests.support.proxy import proxy

IDS = [(5 * i) % 96 for i in range(150)]
FORMATS = ("native", "fp16", "int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2")
_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def ns() -> str:
    return f"lanes-{next(_names)}"


def model_of(dtype: str) -> Any:
    return models.tiny_llama(dtype, hidden_size=128)


def contents(cache: list[Any]) -> list[bytes]:
    return [pack_rows(array, layer.offset).tobytes() for layer in cache for array in (layer.keys, layer.values)]


def by(lane: str, monkeypatch: pytest.MonkeyPatch, port: int, dtype: str, vquant: str, ns: str) -> list[bytes]:
    """What a client gets that may take one way only."""
    monkeypatch.setenv("PION_LANE", lane)
    with PionPromptCache(model_of(dtype), vquant=vquant, port=port) as pc:
        cache = pc.get_or_prefill(IDS, ns)
        assert (pc.hits, pc.misses) == (1, 0)
        assert {name for name, used in pc.lanes.used.items() if used} == {lane}
    for layer in cache:
        for array in (layer.keys, layer.values):
            assert array.shape[2] == len(IDS) + 256
    return contents(cache)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("vquant", FORMATS)
def test_every_lane_gives_the_same(
    server: Any, ns: str, dtype: str, vquant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.need_mlx()
    with PionPromptCache(model_of(dtype), vquant=vquant, port=server.port) as pc:
        computed = contents(pc.get_or_prefill(IDS, ns))
    got = {lane: by(lane, monkeypatch, server.port, dtype, vquant, ns) for lane in ("map", "tcp")}
    assert got["map"] == got["tcp"]
    if vquant == "native" or (vquant == "fp16" and dtype != "float32"):
        assert got["tcp"] == computed
    if dtype == "float16":
        exported = by("export", monkeypatch, server.port, dtype, vquant, ns)
        if vquant in ("native", "fp16"):
            assert exported == computed
    elif vquant == "native":
        monkeypatch.setenv("PION_LANE", "export")
        with (
            PionPromptCache(model_of(dtype), vquant=vquant, port=server.port) as pc,
            pytest.raises(LaneError, match="EXPORT writes fp16"),
        ):
            pc.get_or_prefill(IDS, ns)


def test_what_is_beyond_the_rows_is_zero(server: Any, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models.need_mlx()
    with PionPromptCache(model_of("float32"), port=server.port, vquant="native") as pc:
        pc.get_or_prefill(IDS, ns)
    for lane in ("map", "tcp"):
        monkeypatch.setenv("PION_LANE", lane)
        with PionPromptCache(model_of("float32"), port=server.port, vquant="native") as pc:
            for layer in pc.get_or_prefill(IDS, ns):
                for array in (layer.keys, layer.values):
                    assert not np.asarray(memoryview(array))[:, :, len(IDS) :].any()


def test_in_process_copies_are_independent(server: Any, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models.need_mlx()
    model = model_of("float16")
    with PionPromptCache(model, port=server.port, vquant="native") as pc:
        truth = contents(pc.get_or_prefill(IDS, ns))
        for _ in range(2):
            assert contents(pc.get_or_prefill(IDS, ns)) == truth
        assert pc.lanes.used["process"] == 0
        first = pc.get_or_prefill(IDS, ns)
        assert pc.lanes.used["process"] == 1
        models.greedy(model, first, [1, 2, 3], 4)  # appends to it
        second = pc.get_or_prefill(IDS, ns)
        assert pc.lanes.used["process"] == 2
        assert contents(second) == truth
    with PionPromptCache(model, port=server.port, vquant="native", local_bytes=0) as pc:
        for _ in range(4):
            pc.get_or_prefill(IDS, ns)
        assert pc.lanes.used["process"] == 0
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    assert LocalCopies().max_bytes == 0


def test_local_copies_are_bounded_and_kept_from_the_second_use_on() -> None:
    models.need_mlx()
    import mlx.core as mx

    kept = LocalCopies(3 * 4096)
    arrays = [mx.full((1, 2, 64, 8), value, dtype=mx.float32) for value in (1.0, 2.0)]  # 8 KiB
    assert not kept.put("a", "d", arrays)
    assert kept.get("a", "d") is None
    assert kept.put("a", "d", arrays)
    again = kept.get("a", "d")
    assert again is not None
    assert [float(array.sum()) for array in again] == [1024.0, 2048.0]
    assert kept.get("a", "other digest") is None
    for _ in range(2):
        kept.put("b", "d", arrays)
    assert kept.get("a", "d") is None  # made room
    assert kept.get("b", "d") is not None
    assert kept.nbytes == 8192
    for _ in range(2):
        assert not kept.put("big", "d", arrays * 2)
    kept.drop("b")
    assert kept.nbytes == 0


def test_blank_arrays_of_all_kinds() -> None:
    models.need_mlx()
    wanted = [((1, 2, 3), "bfloat16"), ((0, 4), "float32"), ((5,), "bool"), ((2, 2), "uint32"), ((), "float16")]
    arrays, views = blank_arrays(wanted)
    assert [array.shape for array in arrays] == [shape for shape, _ in wanted]
    assert [len(view) for view in views] == [12, 0, 5, 16, 2]
    for view in views:
        view[:] = bytes(len(view))
    assert [str(array.dtype).rpartition(".")[2] for array in arrays] == [dtype for _, dtype in wanted]
    assert float(arrays[0].sum()) == 0
    with pytest.raises(ValueError, match="float64"):
        blank_arrays([((1,), "float64")])


@pytest.mark.parametrize(
    ("value", "address", "text"),
    [
        ("carrier-pigeon", {}, "want process, map, tcp, export"),
        ("map", {"host": "10.1.2.3"}, "not on this machine"),
        ("export", {"host": "example.org"}, "not on this machine"),
    ],
)
def test_a_lane_that_cannot_be_is_refused(
    value: str, address: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_LANE", value)
    with pytest.raises(ValueError, match=text):
        Lanes(Address(**address))  # type: ignore[arg-type]


def test_a_server_without_a_lane_costs_nothing_but_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models.need_mlx()
    with start_server("--kvcache", "--lane", "off", dir=tmp_path) as server:
        with PionPromptCache(model_of("float16"), port=server.port) as pc:
            truth = contents(pc.get_or_prefill(IDS, "off"))
            assert contents(pc.get_or_prefill(IDS, "off")) == truth
            assert pc.lanes.used["tcp"] == 1
        assert not caplog.records
        monkeypatch.setenv("PION_LANE", "map")
        with (
            PionPromptCache(model_of("float16"), port=server.port) as pc,
            pytest.raises(LaneError, match="--lane off"),
        ):
            pc.get_or_prefill(IDS, "off")
        with Client(host="127.0.0.1", port=server.port) as client, pytest.raises(LaneError, match="--lane off"):
            client.map("off")


def test_a_lane_whose_socket_is_gone_is_left_for_the_connection(tmp_path: Path) -> None:
    models.need_mlx()
    with (
        start_server("--kvcache", dir=tmp_path / "data") as server,
        PionPromptCache(model_of("float16"), port=server.port) as pc,
    ):
        truth = contents(pc.get_or_prefill(IDS, "gone"))
        (tmp_path / "data" / "pion.lane").unlink()
        assert contents(pc.get_or_prefill(IDS, "gone")) == truth
        assert (pc.lanes.used["tcp"], pc.lanes.used["map"]) == (1, 0)


def test_over_a_restart(tmp_path: Path) -> None:
    models.need_mlx()
    with Process(tmp_path / "data") as server:
        with PionPromptCache(model_of("bfloat16"), port=server.port, vquant="int8") as pc:
            pc.get_or_prefill(IDS, "again")
            first = contents(pc.get_or_prefill(IDS, "again"))
            with Client(host="127.0.0.1", port=server.port) as client:
                held = client.map("again")
                before = [held.rows(side, 0).copy() for side in (0, 1)]
        server.restart()
        with PionPromptCache(model_of("bfloat16"), port=server.port, vquant="int8") as pc:
            assert contents(pc.get_or_prefill(IDS, "again")) == first
            assert pc.lanes.used["map"] == 1
        for side in (0, 1):
            np.testing.assert_array_equal(held.rows(side, 0), before[side])


@pytest.mark.parametrize("change", ["drop", "replace"])
def test_what_goes_between_offer_and_file_is_not_used(
    server: Any, ns: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.need_mlx()
    with PionPromptCache(model_of("float32"), vquant="native", port=server.port) as pc:
        truth = contents(pc.get_or_prefill(IDS, ns))
    redeem, struck = mapped._redeem, []

    def strike(told: Any) -> int:
        if not struck:
            struck.append(told)
            with Client(host="127.0.0.1", port=server.port) as client:
                client.drop(ns)
                if change == "replace":
                    other = np.zeros((2, 2, len(IDS), 32), np.float32)
                    client.store(ns, other, other, digest="00" * 32)
        return redeem(told)

    monkeypatch.setattr(mapped, "_redeem", strike)
    with PionPromptCache(model_of("float32"), vquant="native", port=server.port) as pc:
        assert contents(pc.get_or_prefill(IDS, ns)) == truth
        assert struck
        assert pc.hits == 0


# --- layers one by one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["map", "tcp"])
@pytest.mark.parametrize("vquant", ["native", "turbo4"])
def test_layers_as_they_arrive(server: Any, ns: str, lane: str, vquant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models.need_mlx()
    monkeypatch.setenv("PION_LANE", lane)
    model = model_of("float16")
    with PionPromptCache(model, vquant=vquant, port=server.port) as pc:
        with pytest.raises(PrefixMissError):
            pc.iter_layers(IDS, ns)
        pc.get_or_prefill(IDS, ns)
        whole = pc.get_or_prefill(IDS, ns)
        layers = list(pc.iter_layers(IDS, ns))
        assert [layer for layer, _, _ in layers] == [0, 1]
        for layer, keys, values in layers:
            for array, expected in ((keys, whole[layer].keys), (values, whole[layer].values)):
                assert pack_rows(array, len(IDS)).tobytes() == pack_rows(expected, len(IDS)).tobytes()
        lazy = pc.lazy(IDS, ns)
        assert models.greedy(model, lazy, [1, 2, 3], 6) == models.greedy(model, whole, [1, 2, 3], 6)
        from mlx_lm.models.cache import KVCache

        assert all(type(layer) is KVCache for layer in lazy)


def test_a_lazy_cache_that_was_replaced_ends_the_pass(server: Any, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models.need_mlx()
    monkeypatch.setenv("PION_LANE", "tcp")
    model = model_of("float32")
    with PionPromptCache(model, vquant="native", port=server.port) as pc:
        pc.get_or_prefill(IDS, ns)
    with proxy(server.port) as between, Client(host="127.0.0.1", port=server.port) as client:

        def strike(request: bytes) -> None:
            if b"V.FETCH" in request and between.before is not None:
                between.before = None
                other = np.zeros((2, 2, len(IDS), 32), np.float32)
                client.store(ns, other, other, digest="00" * 32, replace=True)

        with PionPromptCache(model, vquant="native", port=between.port) as pc:
            between.before = strike
            cache = pc.lazy(IDS, ns)
            with pytest.raises(IncompleteError):
                models.greedy(model, cache, [1, 2, 3], 2)


# --- numpy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vquant", ["fp16", "native", "int8", "turbo4"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_mapped_views(server: Any, ns: str, vquant: str, dtype: str) -> None:
    shape = (3, 2, 130, 32)
    k, v = (np.random.default_rng(seed).normal(size=shape).astype(dtype) for seed in (1, 2))
    with Client(host="127.0.0.1", port=server.port) as client:
        client.store(ns, k, v, vquant=vquant, digest="ab" * 8)
        fetched = client.fetch(ns)
        with client.map(ns) as found:
            assert (found.layers, found.tokens, found.heads, found.head_dim) == (3, 130, 2, 32)
            assert found.digest == "ab" * 8
            for layer in range(3):
                for array, expected in ((found.k(layer), fetched.k[layer]), (found.v(layer), fetched.v[layer])):
                    np.testing.assert_array_equal(array.astype(expected.dtype), expected)
                    assert not array.flags.writeable
                    with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
                        array.flags.writeable = True
                        array[0, 0, 0] = 1
            if vquant in ("fp16", "native"):
                assert found.k(0).base is not None
                assert np.shares_memory(found.k(0), found.k(0))
        with pytest.raises(PrefixMissError, match="prefix 'nobody': never stored"):
            client.map("nobody")


def test_rows_in_many_pieces(server: Any, ns: str) -> None:
    rows = np.arange(40 * 64, dtype=np.float16).reshape(40, 64)
    with Client(host="127.0.0.1", port=server.port) as client:
        client.call("KV.PREFIX.REGISTER", ns, 64, "fp16", "ROWS", 40, "LAYERS", 1, "HEADS", 2)
        for row in (*range(0, 40, 2), *range(1, 40, 2)):
            for side in ("_pk", "_pv"):
                client.call("V.STOREBATCH", ns + side, 0, row, 1, rows[row].tobytes(), "FMT", "F16")
        with client.map(ns) as found:
            assert len(found.sides[0][0].pieces) > 1
            np.testing.assert_array_equal(found.rows(0, 0), rows)
            np.testing.assert_array_equal(found.rows(1, 0), rows)


def test_no_descriptors_stay_and_a_fork_keeps_its_views(server: Any, ns: str) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    k = np.random.default_rng(0).normal(size=(2, 2, 64, 32)).astype(np.float16)
    with Client(host="127.0.0.1", port=server.port) as client:
        client.store(ns, k, k)
        client.map(ns).close()
        gc.collect()  # what earlier tests have left behind must not go in between
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            client.map(ns).close()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before
        code = f"""
import os, numpy as np
from pion import Client
client = Client(host="127.0.0.1", port={server.port})
found = client.map({ns!r})
first = found.k(0).tobytes()
child = os.fork()
if not child:
    same = found.k(0).tobytes() == first and client.map({ns!r}).k(0).tobytes() == first
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert found.k(0).tobytes() == first
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_that_ends_at_once_ends_in_order(server: Any, ns: str) -> None:
    """mlx's threads let go of a file object late; the interpreter must not have ended by then."""
    models.need_mlx()
    code = "from pion.client.blank import blank_arrays; kept = blank_arrays([((1, 64), 'float32')] * 8)"
    for _ in range(5):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
