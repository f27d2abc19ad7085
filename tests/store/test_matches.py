"""KV.PREFIX.MATCH: the index of blocks follows what comes, changes and goes, and is made anew after a start."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

from pion import Engine
from pion.limits import FORMATS
from pion.ref.prefixtree import PrefixTree
from tests.support.process import Process
from tests.support.raw import Raw, ReplyError

FP16 = FORMATS["fp16"]
DIGEST = "cd" * 32


def packed(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def store(engine: Engine, ns: bytes, *hashes: int, scope: bytes | None = b"s", whole: bool = True) -> None:
    blocks = (16, packed(*hashes))
    engine.register(ns, 4, FP16, blocks=blocks, rows=2, layers=1, scope=scope, digest=DIGEST, replace=True)
    for side in (b"_pk", b"_pv") if whole else (b"_pk",):
        engine.v_store(ns + side, 0, 0, 2, bytes(16), "F16")


def names(engine: Engine, *hashes: int, scope: bytes = b"s") -> list[tuple[bytes, int]]:
    return [(found.ns, found.blocks) for found in engine.match(scope, packed(*hashes))]


def test_the_longest_common_beginning_comes_first(tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        store(engine, b"short", 1, 2)
        store(engine, b"long", 1, 2, 3, 4)
        store(engine, b"other", 1, 9)
        store(engine, b"stranger", 7, 8)
        store(engine, b"elsewhere", 1, 2, 3, scope=b"t")
        store(engine, b"nowhere", 1, 2, 3, scope=None)
        assert names(engine, 1, 2, 3, 5) == [(b"long", 3), (b"short", 2), (b"other", 1)]
        assert engine.match(b"s", packed(1, 2, 3, 5), limit=1) == [(b"long", 3, 2, DIGEST)]
        assert names(engine, 1, scope=b"t") == [(b"elsewhere", 1)]
        assert names(engine, 1, scope=b"unknown") == []
        assert names(engine) == []
        assert [found.ns for found in engine.match(b"s", packed(1, 2), name_prefix=b"sh")] == [b"short"]


def test_only_what_is_complete_and_there(tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        store(engine, b"a", 1, 2)
        store(engine, b"b", 1, 2, whole=False)
        assert names(engine, 1, 2) == [(b"a", 2)]
        engine.v_store(b"b_pv", 0, 0, 2, bytes(16), "F16")
        assert sorted(names(engine, 1, 2)) == [(b"a", 2), (b"b", 2)]
        engine.drop(b"a")
        assert names(engine, 1, 2) == [(b"b", 2)]
        engine.drop(b"b")
        store(engine, b"b", 5, 6)  # other tokens under the name
        assert names(engine, 1, 2) == []
        assert names(engine, 5, 6) == [(b"b", 2)]
        engine.flush()
        assert names(engine, 5, 6) == []


def test_another_scope_or_table_for_an_entry_that_is_there(tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        engine.register(b"ns", 4, FP16, rows=2, layers=1)
        for side in (b"_pk", b"_pv"):
            engine.v_store(b"ns" + side, 0, 0, 2, bytes(16), "F16")
        assert names(engine, 1) == []
        engine.register(b"ns", 4, FP16, scope=b"s")
        assert names(engine, 1) == []
        engine.register(b"ns", 4, FP16, blocks=(16, packed(1)))
        assert names(engine, 1) == [(b"ns", 1)]
        engine.register(b"ns", 4, FP16, blocks=(16, packed(2)), scope=b"t")
        assert names(engine, 1) == names(engine, 2) == []
        assert names(engine, 2, scope=b"t") == [(b"ns", 1)]


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_after_a_start(index: str, tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        for number in range(200):
            store(engine, b"p%d" % number, 1, 2, number % 10, number)
    if index == "lost":
        (tmp_path / "data" / "pion.index").unlink()
    with Engine(tmp_path / "data") as engine:
        if index == "kept":
            assert engine.must_match(b"s")
        end = time.monotonic() + 30
        while len(engine.match(b"s", packed(1, 2, 7, 117), limit=256)) < 200:  # the directory is being listed
            assert time.monotonic() < end
        assert names(engine, 1, 2, 7, 117)[0] == (b"p117", 4)
        assert not engine.must_match(b"s")
        store(engine, b"new", 1, 2, 7, 117, 5)
        assert names(engine, 1, 2, 7, 117, 5)[0] == (b"new", 5)


def test_like_the_twin(tmp_path: Path) -> None:
    rng = random.Random(3)
    twin = PrefixTree()
    with Engine(tmp_path / "data", memory_only=True) as engine:
        for _ in range(300):
            number = rng.randrange(20)
            engine.drop(b"p%d" % number)
            twin.remove(number)
            if rng.random() < 0.7:
                path = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 6))]
                store(engine, b"p%d" % number, *path)
                twin.add(number, packed(*path))
            asked = packed(*(rng.randrange(1, 3) for _ in range(5)))
            found = {int(each.ns[1:]): each.blocks for each in engine.match(b"s", asked, limit=256)}
            assert found == twin.shared(asked)


def test_on_the_wire_also_after_a_kill(tmp_path: Path) -> None:
    with Process(tmp_path / "data") as process:
        blob = packed(11, 12, 13)
        ask = ("KV.PREFIX.MATCH", "scope", 3, packed(11, 12, 99))
        found = [[b"ns", 2, 48, DIGEST.encode()]]
        with Raw(process.port) as conn:
            said = ("BLOCKS", 16, 3, blob, "SCOPE", "scope", "DIGEST", DIGEST, "ROWS", 48, "LAYERS", 0, "STATES", 1)
            assert conn.call("KV.PREFIX.REGISTER", "ns", 1, "fp16", *said) == "OK"
            assert conn.call(*ask) == []
            assert conn.call("SSM.PREFIX.STORE", "ns", 0, b"state") == "OK"
            assert conn.call(*ask) == found
            assert conn.call(*ask, "LIMIT", 1) == found
            for wrong, text in (
                (("KV.PREFIX.MATCH", "scope", 2, blob), "hash_blob length mismatch"),
                (("KV.PREFIX.MATCH", "", 3, blob), "SCOPE length must be 1..200"),
                ((*ask, "LIMIT", 0), "LIMIT out of range (1..256)"),
                ((*ask, "LIMIT"), "option LIMIT needs a value"),
                ((*ask, "COUNT", 1), "unknown option 'COUNT' (LIMIT)"),
                (("KV.PREFIX.MATCH", "scope", 3), "requires"),
            ):
                reply = conn.call(*wrong)
                assert isinstance(reply, ReplyError), wrong
                assert text in str(reply)
        process.kill()
        process.start()
        with Raw(process.port) as conn:
            assert conn.call(*ask) == found
