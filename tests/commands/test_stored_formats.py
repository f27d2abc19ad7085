"""Quantized prefixes over the wire: key forms, schemas, FMT RAW, in every way a body can arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion._core import quantkeys
from pion.client.decode import Decoder
from pion.limits import FORMATS
from pion.wire import raw
from pion.wire.resp import ReplyParser, encode_command
from tests.support.door import Door

ROWS, DIM, HEAD, THETA = 150, 64, 32, 10_000.0
F16 = FORMATS["fp16"]


class Talk:
    """Commands and parsed replies."""

    def __init__(self, door: Door) -> None:
        self.door, self.parser = door, ReplyParser()

    def __call__(self, *parts: object) -> object:
        (reply,) = self.parser.feed(self.door(b"".join(bytes(part) for part in encode_command(*parts))))  # type: ignore
        return reply


@pytest.fixture(params=[None, 1], ids=["whole", "streamed"])
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Talk]:
    with Door(2, directory=tmp_path / "data", stream_min=request.param) as door:
        yield Talk(door)


def keys() -> np.ndarray:
    rng = np.random.default_rng(5)
    return (rng.standard_normal((ROWS, DIM)) + 30 * (rng.random(DIM) < 0.1)).astype(np.float16)


def expected(fmt: int, words: np.ndarray) -> np.ndarray:
    whole = len(words) // 64 * 64
    blocks = quantkeys.encode_keys(F16, fmt, words[:whole].tobytes(), DIM, 0, THETA)
    sealed = np.frombuffer(quantkeys.decode_keys(fmt, blocks, DIM, 0, THETA), np.float32).reshape(-1, DIM)
    return np.concatenate([sealed, words[whole:].astype(np.float32)])


def floats(reply: object) -> np.ndarray:
    assert isinstance(reply, bytes)
    return np.frombuffer(reply, np.float32).reshape(-1, DIM)


@pytest.mark.parametrize("name", ["turbo4", "turbo3", "turbo2"])
def test_keys_of_a_prefix(talk: Talk, name: str) -> None:
    words = keys()
    fmt = (FORMATS[name] + 16) | HEAD << 8
    options = ["ROWS", ROWS, "LAYERS", 1, "HEADS", DIM // HEAD, "HEAD_DIM", HEAD, "ROPE", THETA]
    assert talk("KV.PREFIX.REGISTER", "ns", DIM, name, *options) == "OK"
    for start, end in ((100, 150), (0, 10), (10, 100)):
        assert talk("V.STOREBATCH", "ns_pk", 0, start, end - start, words[start:end].tobytes(), "FMT", "F16") == "OK"
    assert talk("KV.PREFIX.LOOKUP", "ns") == "MISS"
    assert talk("V.STOREBATCH", "ns_pv", 0, 0, ROWS, words.tobytes(), "FMT", "F16") == "OK"
    assert talk("KV.PREFIX.LOOKUP", "ns") == "HIT"
    want = expected(fmt, words)
    assert np.array_equal(floats(talk("V.FETCH", "ns_pk", 0, "RANGE", 0, ROWS)), want)
    assert np.array_equal(floats(talk("V.FETCH", "ns_pk", 0, "RANGE", 60, 140, "FMT", "NATIVE")), want[60:140])
    assert np.array_equal(floats(talk("V.FETCH", "ns_pk", 0, 5, 6, 149, 64)), want[[5, 6, 149, 64]])
    for start, end in ((0, ROWS), (60, 140), (130, 149), (64, 128)):
        answer = talk("V.FETCH", "ns_pk", 0, "RANGE", start, end, "FMT", "RAW")
        assert isinstance(answer, bytes)
        stored = raw.parse(answer)
        assert (stored.dim, stored.start, stored.rows, stored.theta) == (DIM, start, end - start, THETA)
        assert {segment.fmt for segment in stored.segments} <= {fmt, F16}
        out = np.full((end - start, DIM), np.nan, np.float32)
        for first, rows in Decoder(DIM, "float32").pieces(stored, memoryview(answer)):
            out[first : first + len(rows)] = rows
        assert np.array_equal(out, want[start:end])
        assert len(answer) < 4 * DIM * (-(-end // 64) * 64 - start // 64 * 64) / 3
    info = talk("V.INFO", "ns_pk")
    assert isinstance(info, bytes)
    assert b"v_format:%s\r\n" % name.encode() in info
    assert b"layer_0_tokens:150\r\n" in info
    why = talk("KV.PREFIX.WHY", "ns")
    assert isinstance(why, bytes)
    assert f"{name}, {DIM} values per row".encode() in why


def test_a_schema_of_its_own_for_k_and_v(talk: Talk) -> None:
    """int8 keys beside turbo values, the ends kept in fp16."""
    words = keys()
    k = [f"fmt=fp16,dim={DIM}", f"fmt=turbo4,dim={DIM}*2", f"fmt=int8,dim={DIM}"]
    v = [f"fmt=turbo3,dim={DIM}*4"]
    said = ["HEAD_DIM", HEAD, "ROPE", THETA, "ROWS", ROWS, "LAYERS", 4]
    assert talk("KV.PREFIX.REGISTER.SCHEMA", "ns", 4, *k, *v, *said) == "OK"
    for layer in range(4):
        for side in ("_pk", "_pv"):
            assert talk("V.STOREBATCH", f"ns{side}", layer, 0, ROWS, words.tobytes(), "FMT", "F16") == "OK"
    assert talk("KV.PREFIX.LOOKUP", "ns") == "HIT"
    layers = talk("V.FETCH", "ns_pk", "BATCH", 0, ROWS)
    assert isinstance(layers, list)
    assert np.array_equal(floats(layers[0]), words.astype(np.float32))
    for layer in (1, 2):
        assert np.array_equal(floats(layers[layer]), expected(17 | HEAD << 8, words))
    assert np.abs(floats(layers[3]) - words).max() < 0.2
    answers = talk("V.FETCH", "ns_pv", "BATCH", 0, ROWS, "FMT", "RAW")
    assert isinstance(answers, list)
    for answer in answers:
        assert [segment.fmt for segment in raw.parse(answer).segments] == [FORMATS["turbo3"] | HEAD << 8]
    info = talk("V.INFO", "ns_pk")
    assert isinstance(info, bytes)
    assert b"schema:heterogeneous\r\n" in info
    assert b"layer_1_tokens:150\r\nlayer_1_dim:64\r\nlayer_1_fmt:turbo4\r\n" in info
    again = [f"fmt=fp16,dim={DIM}*4", *v, *said]
    assert str(talk("KV.PREFIX.REGISTER.SCHEMA", "ns", 4, *again)).startswith("MISMATCH")
    assert talk("KV.PREFIX.REGISTER.SCHEMA", "ns", 4, *again, "REPLACE") == "OK"
    assert talk("KV.PREFIX.LOOKUP", "ns") == "MISS"


def test_boundary_protect_of_a_published_client(talk: Talk) -> None:
    """Two V.CREATE SCHEMA instead of REGISTER: keys all fp16, values fp16 at both ends (wire.md §1.2)."""
    words = keys()
    assert str(talk("V.CREATE", "ns_pk", 0, "SCHEMA", 3, *[f"fmt=fp16,dim={DIM}"] * 3)).isdigit()
    middle = [f"fmt=fp16,dim={DIM}", f"fmt=turbo4,dim={DIM}", f"fmt=fp16,dim={DIM}"]
    assert str(talk("V.CREATE", "ns_pv", 0, "SCHEMA", 3, *middle)).isdigit()
    for layer in range(3):
        for side in ("_pk", "_pv"):
            assert talk("V.STOREBATCH", f"ns{side}", layer, 0, ROWS, words.astype(np.float32).tobytes()) == "OK"
    sizes = [len(body) for body in talk("V.FETCH", "ns_pv", "BATCH", 0, ROWS, "FMT", "NATIVE")]  # type: ignore
    assert sizes == [2 * ROWS * DIM, 4 * ROWS * DIM, 2 * ROWS * DIM]
    assert talk("KV.PREFIX.LOOKUP", "ns") == "HIT"
