"""Entry files from one data directory into another: `--raw`, and copied by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import Client
from pion._core import framing
from pion.store import layout
from pion.testing import server as start_server
from pion.tools.portability import export_main, import_main

SHAPE = (3, 2, 100, 32)  # layers, heads, tokens, values of a head
Rows = tuple[Any, Any]


def store(client: Client, ns: str, seed: int = 0, **options: Any) -> Rows:
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal(SHAPE).astype(np.float16) for _ in "kv")
    client.store(ns, k, v, digest=f"{seed:064x}", rope=1e4, **options)
    return fetched(client, ns)


def fetched(client: Client, ns: str) -> Rows:
    """K and V as the client decodes them, copied out of its memory pool."""
    k, v, _ = client.fetch(ns)
    return k.copy(), v.copy()


def equal(left: Rows, right: Rows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def path_of(root: Path, ns: str) -> Path:
    return root / layout.entry_path(layout.PREFIX + ns.encode())


@pytest.mark.parametrize("vquant", ["native", "turbo4", "int8", "mlx4g32"])
def test_b12_an_entry_moves_between_two_servers_byte_for_byte(
    tmp_path: Path, vquant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, file = tmp_path / "one", tmp_path / "other", tmp_path / "prefix.pion"
    with start_server("--kvcache", dir=one) as a, Client(port=a.port) as client:
        client.call("KV.PREFIX.REGISTER", "parent", 64, "fp16")
        rows = store(client, "ns", vquant=vquant, scope="s", parent="parent", blocks=(50, [7, 8]))
        client.call("SSM.PREFIX.STORE", "ns", 9, b"state")
        info = client.call("V.INFO", "ns_pk")
        # the server has the directory meanwhile
        assert export_main(["--raw", "--dir", str(one), "ns", str(file)]) == 0
    with start_server("--kvcache", dir=other) as b, Client(port=b.port) as client:
        store(client, "another", 1)
        assert import_main(["--raw", "--dir", str(other), str(file)]) == 1  # held
        b.kill()
        assert import_main(["--raw", "--dir", str(other), str(file)]) == 0
        for end in (b.kill, b.stop):
            b.restart()
            assert client.lookup("ns", digest=f"{0:064x}")
            assert equal(fetched(client, "ns"), rows)
            assert client.lookup("another")
            assert client.call("KV.PREFIX.BLOCKS", "ns")[8:] == (7).to_bytes(8, "little") + (8).to_bytes(8, "little")
            assert client.call("SSM.PREFIX.FETCH", "ns", 9) == b"state"
            got = client.call("V.INFO", "ns_pk").split(b"\r\n")
            assert got[1:] == info.split(b"\r\n")[1:]  # but for the session's number
            assert client.call("KV.PREFIX.LIST", "SCOPE", "s", "0")[1] == [b"ns"]
            end()
    assert path_of(other, "ns").read_bytes() == file.read_bytes()
    capsys.readouterr()
    assert import_main(["--dir", str(other), str(file)]) == 1
    assert f"{file} is an entry file of a Pion store" in (said := capsys.readouterr().err)
    assert "import it with --raw --dir DIR" in said


def test_b12_a_file_copied_by_hand_is_adopted_at_start(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with start_server("--kvcache", dir=one) as a, Client(port=a.port) as client:
        rows = store(client, "ns")
    with start_server("--kvcache", dir=other) as b, Client(port=b.port) as client:
        store(client, "another", 1)
        b.stop()
        target = path_of(other, "ns")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path_of(one, "ns"), target)
        b.restart()
        until(lambda: client.lookup("ns", digest=f"{0:064x}"))
        assert equal(fetched(client, "ns"), rows)
        assert client.lookup("another")
        b.kill()
        b.restart()
        assert equal(fetched(client, "ns"), rows)


def until(condition: Callable[[], bool]) -> None:
    import time

    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def test_b5_a_dropped_entry_comes_back_by_import_only(tmp_path: Path) -> None:
    root, file = tmp_path / "data", tmp_path / "prefix.pion"
    with start_server("--kvcache", dir=root) as server, Client(port=server.port) as client:
        rows = store(client, "ns")
        assert export_main(["--raw", "--dir", str(root), "ns", str(file)]) == 0
        assert client.drop("ns") == 1
        server.kill()
        shutil.copyfile(file, path_of(root, "ns"))  # the index knows that this very file was dropped
        server.restart()
        assert not client.lookup("ns")
        server.stop()
        assert import_main(["--raw", "--dir", str(root), str(file)]) == 0
        for _ in range(2):
            server.restart()
            assert equal(fetched(client, "ns"), rows)
            server.kill()


def test_a_name_that_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, file = tmp_path / "data", tmp_path / "prefix.pion"
    with start_server("--kvcache", dir=root) as server, Client(port=server.port) as client:
        old = store(client, "ns")
        assert export_main(["--raw", "--dir", str(root), "ns", str(file)]) == 0
        new = store(client, "ns", 1, replace=True)
        assert not equal(old, new)
        server.stop()
        assert import_main(["--raw", "--dir", str(root), str(file)]) == 1
        assert "is there already" in capsys.readouterr().err
        server.restart()
        assert equal(fetched(client, "ns"), new)
        server.stop()
        assert import_main(["--raw", "--replace", "--dir", str(root), str(file)]) == 0
        server.restart()
        assert equal(fetched(client, "ns"), old)


def test_b1_damaged_and_strange_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, file = tmp_path / "data", tmp_path / "prefix.pion"
    with start_server("--kvcache", dir=root) as server, Client(port=server.port) as client:
        store(client, "ns")
        client.call("KV.PREFIX.REGISTER", "half", 64, "fp16", "ROWS", 100, "LAYERS", 3)
        assert export_main(["--raw", "--dir", str(root), "ns", str(file)]) == 0
        for ns, why in (("half", "does not hold all 100 rows"), ("nobody", "holds no prefix")):
            assert export_main(["--raw", "--dir", str(root), ns, str(tmp_path / "no.pion")]) == 1
            assert why in capsys.readouterr().err
            assert not (tmp_path / "no.pion").exists()
    good = file.read_bytes()
    later = framing.pack_file_header(layout.ENTRY_TYPE, version=layout.ENTRY_VERSION + 1, generation=7)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    header = bytearray(good)
    header[len(framing.pack_file_header(layout.ENTRY_TYPE, version=1, generation=1)) // 2] ^= 1
    cases: dict[str, tuple[bytes, str]] = {
        "flipped": (bytes(flipped), "is damaged"),
        "header": (bytes(header), "is no entry file"),
        "short": (good[: len(good) // 2], "does not hold all 100 rows"),
        "foreign": (os.urandom(5000), "is no entry file"),
        "empty": (b"", "is no entry file"),
        "later": (later, "a later format version"),
    }
    for name, (data, why) in cases.items():
        bad = tmp_path / f"{name}.pion"
        bad.write_bytes(data)
        assert import_main(["--raw", "--replace", "--dir", str(root), str(bad)]) == 1, name
        assert why in capsys.readouterr().err, name
    with start_server("--kvcache", dir=root) as server, Client(port=server.port) as client:
        assert client.lookup("ns")
        # a damaged entry of ours is not handed on
        server.stop()
        path_of(root, "ns").write_bytes(bytes(flipped))
        assert export_main(["--raw", "--dir", str(root), "ns", str(tmp_path / "no.pion")]) == 1


def test_options_that_have_no_place_beside_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "x.pion")
    assert export_main(["--raw", "ns", file]) == 1
    assert "--dir" in capsys.readouterr().err
    assert import_main(["--raw", "--dir", str(tmp_path), file, "ns"]) == 1
    assert "give none" in capsys.readouterr().err
    assert import_main(["--raw", "--dir", str(tmp_path), file, "--digest", "ab"]) == 1
    assert "--digest has no place" in capsys.readouterr().err
