"""`pion inspect FILE`: an entry, the index, the keyspace's files, and what is none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pion.cli import main
from pion.limits import FORMATS
from pion.store import index, layout
from pion.store.engine import Engine
from pion.tools import show
from tests.store.model import F16, words
from tests.store.support import DIM, fill

BIG = b"x" * ((1 << 20) + 7)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    with Engine(root, ticker=False) as engine:
        fill(
            engine, b"app|v1", rows=40, layers=3, digest="ab" * 16, scope=b"chat", parent=b"base", heads=2, head_dim=32,
            rope=10000.0,
        )  # fmt: skip
        engine.v_store(b"app|v1_pk", 1, 0, 8, words(1, 8, DIM, F16), "F16")
        engine.ssm_store(b"app|v1", 2, b"s" * 100)
        engine.register(b"blocks", DIM, FORMATS["int8"], blocks=(16, b"12345678" * 3))
        engine.v_create(b"raw", DIM, F16)
        engine.v_store(b"raw", 0, 5, 2, words(1, 2, DIM, F16), "F16")
        engine.keyspace.set(0, b"key", b"value", 1_900_000_000_000)
        engine.keyspace.set(1, b"big", BIG)
        engine.keyspace.delete(0, b"nothing")
        engine.keyspace.flush_log()
    return root


def _path(root: Path, key: bytes) -> Path:
    return root / layout.entry_path(key)


def _json(capsys: pytest.CaptureFixture[str], path: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    assert main(["inspect", "--json", *flags, str(path)]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_entry(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _path(data, b"papp|v1")
    about = _json(capsys, path, "--verify")
    assert about["type"] == "entry"
    assert (about["domain"], about["name"], about["version"]) == ("prefix", "app|v1", 1)
    assert about["declared"] == {
        "rows": 40, "layers": 3, "digest": "ab" * 16, "scope": "chat", "parent": "base", "heads": 2, "head_dim": 32,
        "rope": 10000.0,
    }  # fmt: skip
    keys, values = about["sides"]
    assert (keys["side"], keys["format"], keys["dim"], keys["rows"]) == ("K", "fp16", DIM, 120)
    assert keys["bytes"] == values["bytes"] == 120 * DIM * 2
    assert [layer["extents"] for layer in keys["layers"]] == [1, 2, 1]
    assert about["states"] == {"2": 100}
    assert about["bytes"] == about["record_bytes"] == path.stat().st_size
    stores = [record for record in about["records"] if record["kind"] == "STORE"]
    assert len(stores) == 7
    assert stores[-1]["about"] == "layer 1 K rows 0..7"
    assert all(record["checksum"] is True for record in stores)
    content = path.read_bytes()
    at = stores[-1]["payload_offset"]
    assert content[at : at + stores[-1]["payload_bytes"]] == words(1, 8, DIM, F16)
    assert about["dead_bytes"] == 8 * DIM * 2
    assert about["findings"] == []


def test_an_entry_as_text(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(_path(data, b"papp|v1"))]) == 0
    text = capsys.readouterr().out
    for part in (
        "entry, format version 1", "app|v1", "digest       " + "ab" * 16, "parent       base", "rope         10000.0",
        "K            fp16, 64 values; 120 rows in 3 layers, 15360 bytes", "layers 0..2: 40 rows in 1 extent",
        "state        layer 2: 100 bytes", "dead bytes   1024", "STORE       layer 1 K rows 0..7, 1024 bytes at",
    ):  # fmt: skip
        assert part in text, part
    assert main(["inspect", "--summary", str(_path(data, b"rraw"))]) == 0
    text = capsys.readouterr().out
    assert "domain       session" in text
    assert "layer 0: 2 rows in 1 extent, length 7" in text
    assert "STORE" not in text


def test_a_damaged_entry_is_printed_as_far_as_it_can_be(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _path(data, b"papp|v1")
    whole = _json(capsys, path)
    assert {record["checksum"] for record in whole["records"]} == {None}, "not asked for"
    third = whole["records"][2]
    content = bytearray(path.read_bytes())
    content[third["payload_offset"]] ^= 1
    path.write_bytes(content)
    assert _json(capsys, path)["findings"] == []
    about = _json(capsys, path, "--verify", status=1)
    assert [record["checksum"] for record in about["records"][1:4]] == [True, False, True]
    (finding,) = about["findings"]
    assert finding["offset"] == third["offset"]
    assert main(["inspect", "--verify", str(path)]) == 1
    assert capsys.readouterr().out.count("CHECKSUM WRONG") == 1
    content[whole["records"][3]["offset"] + 20] ^= 1
    path.write_bytes(content)
    about = _json(capsys, path, status=1)
    assert len(about["records"]) == len(whole["records"]) - 1
    assert "damaged bytes in front of whole records" in about["findings"][0]["text"]


def test_the_index(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = _json(capsys, data / "pion.index")
    assert about["type"] == "index"
    assert about["counts"] == {"CLOSED": 1, "OPENED": 1, "PUT": 3}
    put = {record["name"]: record for record in about["records"] if record["kind"] == "PUT"}
    assert put["app|v1"]["clean"] is True
    assert put["app|v1"]["size"] == _path(data, b"papp|v1").stat().st_size
    assert put["app|v1"]["path"] == layout.entry_path(b"papp|v1")
    assert main(["inspect", str(data / "pion.index")]) == 0
    assert "3 PUT" in capsys.readouterr().out
    os.truncate(data / "pion.index", (data / "pion.index").stat().st_size - 3)
    assert len(_json(capsys, data / "pion.index", status=1)["records"]) == 4


def test_the_files_of_the_keyspace(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = _json(capsys, data / "pion.wal.1")
    assert (about["type"], about["attributes"]["number"]) == ("keyspace log", 1)
    key, big = about["records"][:2]
    assert (key["kind"], key["key"], key["value_bytes"], key["expire_ms"]) == ("SET", "key", 5, 1_900_000_000_000)
    assert (big["kind"], big["db"], big["value_bytes"]) == ("BLOB", 1, len(BIG))
    value = _json(capsys, data / big["value_file"])
    assert (value["type"], value["value_bytes"], value["checksum"]) == ("value", len(BIG), True)
    content = bytearray((data / big["value_file"]).read_bytes())
    content[-1] ^= 1
    (data / big["value_file"]).write_bytes(content)
    assert _json(capsys, data / big["value_file"], status=1)["checksum"] is False


def test_a_snapshot_with_a_record_larger_than_what_is_read_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "data", ticker=False) as engine:
        for i in range(9):
            engine.keyspace.set(0, b"k%d" % i, b"x" * 1_000_000)  # below the size of a file of its own
        engine.keyspace.flush_log()
        assert engine.keyspace_store is not None
        engine.keyspace_store.rewrite_now()
    about = _json(capsys, tmp_path / "data/pion.snapshot.2")
    assert about["counts"] == {"END": 1, "SET": 9}
    assert about["record_bytes"] == about["bytes"]


@pytest.mark.parametrize("what", ["nothing", "text", "empty", "directory"])
def test_what_is_no_file_of_ours(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if what == "directory":
        path.mkdir()
    elif what != "nothing":
        path.write_text("hello" if what == "text" else "")
    assert main(["inspect", str(path)]) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"pion inspect: {path}: ")
    assert out.out == ""


def test_whoever_reads_may_stop_reading(data: Path) -> None:
    command = [sys.executable, "-m", "pion.cli", "inspect", "--json", str(_path(data, b"papp|v1"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) in (0, 1)


def test_every_kind_of_record_of_the_index_has_a_name() -> None:
    kinds = (index.PUT, index.DROP, index.DIRTY, index.USED, index.OPENED, index.CLOSED, index.MAKING)
    assert tuple(show.INDEX_KINDS) == kinds
    for kind, name in show.INDEX_KINDS.items():
        assert getattr(index, name) == kind
