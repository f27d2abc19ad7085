"""`pion export` and `pion import`: prefixes as prompt-cache files of mlx-lm, between real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import Client, PionPromptCache
from pion.client.cache_files import checksum
from pion.errors import MismatchError
from pion.testing import Server
from pion.testing import server as start_server
from pion.tools.portability import export_main, import_main
from tests.support import models

models.need_mlx()
mx = models.mx

import mlx_lm.models.cache as mlx_cache  # noqa: E402

pytestmark = pytest.mark.timeout(300)
IDS = list(range(1, 81))  # 64 tokens make one group of turbo keys; 16 stay loose
TEXT = "You are the assistant of the Harbour Street Library. Answer in one short sentence. It opens at ten."


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("servers")
    with start_server("--kvcache", dir=folder / "a") as one, start_server("--kvcache", dir=folder / "b") as other:
        yield one, other


def wide_llama(dtype: str = "float16", **changes: Any) -> Any:
    """Heads of 32 values, so that mlx4g32 takes them one by one."""
    return models.tiny_llama(dtype, hidden_size=128, num_hidden_layers=3, rope_theta=1e4, **changes)


def export(server: Server, *arguments: Any) -> None:
    assert export_main(["--port", str(server.port), *map(str, arguments)]) == 0


def load(path: Path) -> tuple[list[Any], dict[str, str]]:
    cache, metadata = mlx_cache.load_prompt_cache(str(path), return_metadata=True)
    return cache, metadata


def assert_equal(left: Any, right: Any) -> None:
    """The same words in the same dtype."""
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    kind = {2: mx.uint16, 4: mx.uint32}[left.dtype.size]
    assert mx.array_equal(left.view(kind), right.view(kind)).item()


def assert_holds(cache: list[Any], wanted: list[Any], count: int) -> None:
    assert len(cache) == len(wanted)
    for got, want in zip(cache, wanted, strict=True):
        assert type(got) is mlx_cache.KVCache
        assert got.offset == count
        for name in ("keys", "values"):
            assert_equal(getattr(got, name)[:, :, :count], getattr(want, name)[:, :, :count])


@pytest.mark.parametrize(("dtype", "vquant"), [("float32", "fp16"), ("float32", "native"), ("bfloat16", "fp16")])
def test_a_real_model_goes_through_a_file_word_for_word(
    servers: tuple[Server, Server], tmp_path: Path, dtype: str, vquant: str
) -> None:
    model, tokenizer = models.smollm2_model(dtype)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)[: 12 if dtype == "bfloat16" else None]
    one, other = servers
    path, ns = tmp_path / "prefix.safetensors", f"real-{dtype}-{vquant}"
    with PionPromptCache(model, vquant=vquant, port=one.port) as pc:
        pc.get_or_prefill(ids, ns)
        stored = pc.get_or_prefill(ids, ns)
    export(one, ns, path)
    cache, metadata = load(path)
    if vquant == "native" or dtype == "bfloat16":
        assert_holds(cache, stored, len(ids))
    for layer, got in enumerate(cache):  # what the store was given, by the hand of mlx
        assert got.keys.dtype == {"native": mx.float32}.get(vquant, mx.float16 if dtype == "float32" else mx.bfloat16)
        assert mx.array_equal(got.keys.astype(mx.float32), stored[layer].keys[:, :, : len(ids)].astype(mx.float32))
    assert metadata["pion_namespace"] == ns
    assert models.greedy(model, cache, [1, *ids[:3]], 5) == models.greedy(model, stored, [1, *ids[:3]], 5)

    assert import_main(["--port", str(other.port), str(path)]) == 0
    with PionPromptCache(model, vquant=vquant, port=other.port) as pc:
        again = pc.get_or_prefill(ids, ns)
        assert (pc.hits, pc.misses) == (1, 0)
    for got, want in zip(again, stored, strict=True):
        assert_equal(got.values[:, :, : len(ids)], want.values[:, :, : len(ids)])


@pytest.mark.parametrize("vquant", ["int8", "fp8", "turbo4", "turbo2"])
def test_quantized_rows_come_out_as_a_fetch_decodes_them(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str], vquant: str
) -> None:
    model, path = wide_llama(), tmp_path / "q.safetensors"
    with PionPromptCache(model, vquant=vquant, port=servers[0].port) as pc:
        pc.get_or_prefill(IDS, f"q-{vquant}")
        fetched = pc.get_or_prefill(IDS, f"q-{vquant}")
    export(servers[0], f"q-{vquant}", path)
    assert f"stored as {vquant}, decoded to float16" in capsys.readouterr().out
    assert_holds(load(path)[0], fetched, len(IDS))
    # stored in the same format again, it serves the same client
    assert import_main(["--port", str(servers[1].port), str(path)]) == 0
    with PionPromptCache(model, vquant=vquant, port=servers[1].port) as pc:
        pc.get_or_prefill(IDS, f"q-{vquant}")
        assert pc.hits == 1


def test_mlx4g32_is_a_quantized_cache_of_mlx(servers: tuple[Server, Server], tmp_path: Path) -> None:
    model, path = wide_llama(), tmp_path / "m.safetensors"
    with PionPromptCache(model, vquant="mlx4g32", port=servers[0].port) as pc:
        computed = pc.get_or_prefill(IDS, "m")
    export(servers[0], "m", path)
    cache, _ = load(path)
    assert [(type(c), c.offset, c.group_size, c.bits) for c in cache] == [(mlx_cache.QuantizedKVCache, 80, 32, 4)] * 3
    for got, want in zip(cache, computed, strict=True):
        for name in ("keys", "values"):
            array = getattr(want, name)[:, :, :80]
            for left, right in zip(getattr(got, name), mx.quantize(array, group_size=32, bits=4), strict=True):
                assert_equal(left, right)
    assert len(models.greedy(model, cache, [1, 2], 4)) == 4
    assert import_main(["--port", str(servers[1].port), str(path), "--vquant", "native"]) == 0
    with Client(port=servers[1].port) as client:
        k, v, dtype = client.fetch("m")
    for layer, want in enumerate(cache):
        for got, triple in ((k[layer], want.keys), (v[layer], want.values)):
            decoded = np.array(mx.dequantize(*triple, group_size=32, bits=4)[0, :, :80])
            assert dtype == "float16"
            assert np.array_equal(got.view(np.uint16), decoded.view(np.uint16))


def test_formats_are_carried_layer_by_layer(servers: tuple[Server, Server], tmp_path: Path) -> None:
    model = wide_llama("bfloat16")
    path = tmp_path / "mixed.safetensors"
    with PionPromptCache(model, vquant="mlx4g32", boundary_protect=1, port=servers[0].port) as pc:
        pc.get_or_prefill(IDS, "mixed")
        fetched = pc.get_or_prefill(IDS, "mixed")
    export(servers[0], "mixed", path)
    cache, metadata = load(path)
    assert metadata["pion_formats"] == "bf16+bf16/mlx4g32"
    assert metadata["pion_decoded_to"] == "bfloat16"  # the K beside it is bf16, so V is no QuantizedKVCache
    assert_holds(cache, fetched, len(IDS))


def test_a_directory_that_no_server_holds(servers: tuple[Server, Server], tmp_path: Path) -> None:
    model = wide_llama()
    with PionPromptCache(model, vquant="int8", port=servers[0].port) as pc:
        pc.get_or_prefill(IDS, "dir")
    export(servers[0], "dir", tmp_path / "over.safetensors")
    assert import_main(["--dir", str(tmp_path / "data"), str(tmp_path / "over.safetensors")]) == 0
    assert export_main(["--dir", str(tmp_path / "data"), "dir", str(tmp_path / "back.safetensors")]) == 0
    for left, right in zip(load(tmp_path / "over.safetensors")[0], load(tmp_path / "back.safetensors")[0], strict=True):
        assert mx.allclose(left.keys, right.keys, atol=0.02, rtol=0.02).item()  # int8, encoded twice
    with start_server("--kvcache", dir=tmp_path / "data") as server:
        with PionPromptCache(model, vquant="int8", port=server.port) as pc:
            pc.get_or_prefill(IDS, "dir")
            assert pc.hits == 1
        assert export_main(["--dir", str(tmp_path / "data"), "dir", str(tmp_path / "held.safetensors")]) == 1


# --- what is not exported --------------------------------------------------------------------------------------------


def register(client: Client, ns: str, *options: Any) -> None:
    client.call("KV.PREFIX.REGISTER", ns, 16, "fp16", *options)


def test_b7_only_complete_prefixes_are_exported(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, rows = servers[0].port, np.ones((4, 16), np.float16).tobytes()
    with Client(port=port) as client:
        register(client, "short", "ROWS", 4, "LAYERS", 2, "HEADS", 2)
        for sid in ("short_pk", "short_pv"):
            client.call("V.STOREBATCH", sid, 0, 0, 4, rows, "FMT", "F16")
        register(client, "open", "HEADS", 2)
        for sid in ("open_pk", "open_pv"):
            client.call("V.STOREBATCH", sid, 0, 0, 4, rows, "FMT", "F16")
        register(client, "flat", "ROWS", 4, "LAYERS", 1)
        register(client, "hybrid", "ROWS", 4, "LAYERS", 1, "HEADS", 2)
        for ns in ("flat", "hybrid"):
            for side in ("_pk", "_pv"):
                client.call("V.STOREBATCH", ns + side, 0, 0, 4, rows, "FMT", "F16")
        client.call("SSM.PREFIX.STORE", "hybrid", 1, b"state")
    expected = {
        "nobody": "never stored",
        "short": "layer 1 of K holds 0 of 4 rows",
        "open": "without ROWS and LAYERS",
        "flat": "--heads",
        "hybrid": "recurrent state of 1 layers",
    }
    for ns, why in expected.items():
        path = tmp_path / f"{ns}.safetensors"
        assert export_main(["--port", str(port), ns, str(path)]) == 1
        said = capsys.readouterr().err
        assert why in said
        assert said.startswith(f"pion export: {ns}: ")
        assert list(tmp_path.iterdir()) == []
    assert export_main(["--port", str(port), "flat", str(tmp_path / "flat.safetensors"), "--heads", "3"]) == 1
    export(servers[0], "flat", tmp_path / "flat.safetensors", "--heads", 4)
    assert load(tmp_path / "flat.safetensors")[0][0].keys.shape == (1, 4, 4, 4)


def test_a_file_is_written_as_a_whole_and_not_over_another_one(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with PionPromptCache(wide_llama(), port=servers[0].port) as pc:
        pc.get_or_prefill(IDS, "whole")
    path = tmp_path / "x.safetensors"
    path.write_text("mine")
    port = ["--port", str(servers[0].port)]
    assert export_main([*port, "whole", str(path)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert export_main([*port, "whole", str(path), "--replace"]) == 0
    assert len(load(path)[0]) == 3
    assert export_main([*port, "whole", str(tmp_path / "x.bin")]) == 1
    assert capsys.readouterr().err.startswith(f"pion export: {tmp_path}/x.bin: mlx-lm loads a prompt cache from a name")
    assert export_main([*port, "whole", str(tmp_path / "no" / "x.safetensors")]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path}/no/x.safetensors" in said
    assert "/.x." not in said
    assert [item.name for item in tmp_path.iterdir()] == ["x.safetensors"]
    assert export_main(["--dir", str(tmp_path), "whole", str(tmp_path / "y.safetensors")]) == 1
    assert "is no data directory" in capsys.readouterr().err
    assert export_main(["--dir", str(tmp_path), *port, "whole", "y.safetensors"]) == 1
    assert export_main(["whole"]) == 2


def test_it_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("open sesame\n")
    path = tmp_path / "x.safetensors"
    with start_server("--kvcache", "--requirepass-file", str(secret)) as server:
        with PionPromptCache(wide_llama(), port=server.port, password="open sesame") as pc:
            pc.get_or_prefill(IDS, "ns")
        port = ["--port", str(server.port)]
        assert export_main([*port, "ns", str(path)]) == 1
        assert export_main([*port, "--password-file", str(secret), "ns", str(path)]) == 0
        assert import_main([*port, "--password", "open sesame", str(path), "second"]) == 0
        monkeypatch.setenv("PION_PASSWORD", "open sesame")
        assert import_main([*port, str(path), "third"]) == 0
        url = f"pion://:open%20sesame@127.0.0.1:{server.port}"
        assert export_main(["--url", url, "third", str(path), "--replace"]) == 0


# --- what is imported ------------------------------------------------------------------------------------------------


def cache_file(path: Path, layers: list[Any], metadata: dict[str, str] | None = None) -> Path:
    mlx_cache.save_prompt_cache(str(path), layers, metadata or {})
    return path


def computed(count: int = 20, heads: int = 2, dim: int = 8, dtype: Any = None) -> list[Any]:
    out = []
    for _ in range(2):
        cache = mlx_cache.KVCache()
        cache.update_and_fetch(*(mx.random.normal((1, heads, count, dim)).astype(dtype or mx.float16) for _ in "kv"))
        out.append(cache)
    return out


def test_a_file_of_mlx_lm_is_found_by_its_namespace(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.tiny_llama("bfloat16")
    cache = mlx_cache.make_prompt_cache(model)
    model(mx.array([IDS]), cache=cache)
    path = cache_file(tmp_path / "theirs.safetensors", cache, {"model": "tiny"})
    port = ["--port", str(servers[0].port)]
    assert import_main([*port, str(path)]) == 1
    assert "names no namespace" in capsys.readouterr().err
    assert import_main([*port, str(path), "theirs"]) == 0
    assert "without a digest" in capsys.readouterr().out
    with Client(port=servers[0].port) as client:
        k, v, dtype = client.fetch("theirs")
        assert dtype == "bfloat16"
        for got, want in ((k[1], cache[1].keys), (v[1], cache[1].values)):
            assert np.array_equal(got, np.array(want[0, :, :80].view(mx.uint16)))
    with PionPromptCache(model, port=servers[0].port) as pc:
        assert pc.lookup("theirs")
        with pytest.raises(MismatchError, match="none"):
            pc.get_or_prefill(IDS, "theirs")


def test_model_and_tokens_make_the_digest(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    made = models.tiny_llama("float16", head_dim=8)
    folder = tmp_path / "model"
    folder.mkdir()
    config = {name: value for name, value in vars(made.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())))
    model = load_model(folder)[0]
    cache = mlx_cache.make_prompt_cache(model)
    model(mx.array([IDS]), cache=cache)
    path = cache_file(tmp_path / "theirs.safetensors", cache)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    port = ["--port", str(servers[0].port)]
    assert import_main([*port, "--model", str(folder), "--tokens", str(ids), str(path), "known"]) == 0
    with PionPromptCache(model, port=servers[0].port) as pc:
        assert_holds(pc.get_or_prefill(IDS, "known"), cache, 80)
        assert pc.hits == 1
    ids.write_text(json.dumps(IDS[:-1]))
    assert import_main([*port, "--model", str(folder), "--tokens", str(ids), str(path), "other"]) == 1
    assert "holds 80 tokens" in capsys.readouterr().err
    assert import_main([*port, "--model", str(folder), str(path), "other"]) == 1


def test_a_cache_that_went_on_does_not_keep_its_digest(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = wide_llama(), tmp_path / "x.safetensors"
    port = ["--port", str(servers[0].port)]
    with PionPromptCache(model, port=servers[0].port) as pc:
        pc.get_or_prefill(IDS, "went-on")
    export(servers[0], "went-on", path)
    cache, metadata = load(path)
    models.greedy(model, cache, [1], 3)
    longer = cache_file(tmp_path / "longer.safetensors", cache, metadata)
    assert import_main([*port, str(longer), "longer"]) == 1
    assert "its digest does not hold" in capsys.readouterr().err
    assert import_main([*port, str(longer), "longer", "--no-digest"]) == 0
    assert import_main([*port, str(longer), "longer", "--digest", "ab" * 32, "--replace"]) == 0
    # the same length, another value
    cache, metadata = load(path)
    cache[1].values = cache[1].values + 1
    changed = cache_file(tmp_path / "changed.safetensors", cache, metadata)
    assert import_main([*port, str(changed), "changed"]) == 1
    # and one whose digest is somebody else's
    assert import_main([*port, str(path), "other", "--digest", "ab" * 32]) == 1
    assert "other tokens or another model" in capsys.readouterr().err


def test_a_name_that_holds_something_else_is_not_overwritten(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = ["--port", str(servers[0].port)]
    path = cache_file(tmp_path / "x.safetensors", computed())
    with PionPromptCache(models.tiny_llama(), port=servers[0].port) as pc:
        pc.get_or_prefill(IDS, "taken")
        assert import_main([*port, str(path), "taken"]) == 1
        assert "MISMATCH" in capsys.readouterr().err
        pc.get_or_prefill(IDS, "taken")
        assert pc.hits == 1
    assert import_main([*port, str(path), "taken", "--replace"]) == 0


def test_d8_other_caches_are_refused_by_name(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        assert import_main(["--port", str(servers[0].port), str(path), "never"]) == 1
        with Client(port=servers[0].port) as client:
            assert not client.lookup("never")
        return capsys.readouterr().err

    rotating = mlx_cache.RotatingKVCache(max_size=64)
    rotating.update_and_fetch(mx.zeros((1, 2, 4, 8)), mx.zeros((1, 2, 4, 8)))
    assert "RotatingKVCache" in refused(cache_file(tmp_path / "1.safetensors", [*computed(4), rotating]))
    two = mlx_cache.KVCache()
    two.update_and_fetch(mx.zeros((2, 2, 4, 8)), mx.zeros((2, 2, 4, 8)))
    assert "(2, 2, " in refused(cache_file(tmp_path / "2.safetensors", [two]))
    assert "different length" in refused(cache_file(tmp_path / "3.safetensors", [*computed(4), *computed(5)]))
    assert "differ" in refused(cache_file(tmp_path / "4.safetensors", [*computed(4), *computed(4, heads=4)]))
    assert "differ" in refused(cache_file(tmp_path / "5.safetensors", [*computed(4), *computed(4, dtype=mx.float32)]))
    mx.save_safetensors(str(tmp_path / "6.safetensors"), {"weight": mx.zeros((2, 2))})
    assert "names no cache classes" in refused(tmp_path / "6.safetensors")
    whole = cache_file(tmp_path / "7.safetensors", computed(40))
    (tmp_path / "8.safetensors").write_bytes(whole.read_bytes()[:3000])
    assert "no whole safetensors file" in refused(tmp_path / "8.safetensors")
    (tmp_path / "9.safetensors").write_bytes(b"")
    assert "no whole safetensors file" in refused(tmp_path / "9.safetensors")
    assert "No such file" in refused(tmp_path / "10.safetensors")
    assert refused(cache_file(tmp_path / "11.safetensors", computed(4, dim=5000)))  # rows of 10,000 values


def test_the_checksum_is_of_words_shapes_and_dtypes() -> None:
    from pion.client.cache_files import Float

    a, b = mx.arange(8, dtype=mx.float16).reshape(1, 2, 2, 2), mx.zeros((1, 2, 2, 2), mx.float16)
    sums = {
        checksum([Float(a, b)]),
        checksum([Float(b, a)]),
        checksum([Float(a.swapaxes(1, 2), b)]),
        checksum([Float(a.view(mx.bfloat16), b)]),
        checksum([Float(a.reshape(1, 1, 4, 2), b)]),
    }
    assert len(sums) == 5
