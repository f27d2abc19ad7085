"""Storing and fetching arrays: what is sent, and that anything short, missing or foreign raises.

A healthy server is tested elsewhere; this one can lose layers, shorten them, and change between two commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion.client import tensors
from pion.client.errors import ConnectionLostError, IncompleteError, PrefixMissError
from pion.client.sync import Client
from pion.errors import CommandError, MismatchError
from pion.limits import FORMATS
from pion.wire import raw

L, H, N, D = 3, 2, 5, 8
DTYPES: list[tuple[str, Any]] = [("float16", np.float16), ("float32", np.float32), ("bfloat16", np.uint16)]


def words(kind: Any, seed: int, shape: tuple[int, ...] = (L, H, N, D)) -> Any:
    """Random bit patterns, NaN and infinities among them."""
    noise = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8)
    return noise.view(kind)[..., 0]


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)))


class FaultyStore:
    """Keeps rows as they come; `faults` maps (side, layer) to what happens to that layer of a V.FETCH reply."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.shape: dict[str, bytes] = {}
        self.rows: dict[tuple[bytes, int], bytes] = {}
        self.faults: dict[tuple[bytes, int], Any] = {}
        self.infos: list[dict[str, Any]] = []
        self.refuse: str | None = None
        self.found = b"+HIT\r\n"

    def __call__(self, peer: Any, argv: list[bytes]) -> Any:
        name, args = argv[0].decode(), argv[1:]
        known = {
            "KV.PREFIX.REGISTER": self.register,
            "KV.PREFIX.LOOKUP": lambda *_: self.answers["raw"](self.found),
            "KV.PREFIX.WHY": lambda ns: b"dropped 3 s ago",
            "V.STOREBATCH": self.storebatch,
            "V.INFO": self.info,
            "V.FETCH": self.fetch,
        }
        return known[name](*args) if name in known else self.answers["ordinary"](peer, argv)

    def register(self, ns: bytes, dim: bytes, fmt: bytes, *options: bytes) -> Any:
        if self.refuse:
            return self.answers["error"](self.refuse)
        words = [option.decode() for option in options if option != b"REPLACE"]
        self.shape = {"dim": dim, "fmt": fmt, **{k: v.encode() for k, v in zip(words[::2], words[1::2], strict=True)}}
        return self.answers["raw"](b"+OK\r\n")

    def storebatch(self, sid: bytes, layer: bytes, *rest: bytes) -> Any:
        self.rows[sid, int(layer)] = rest[2]
        return self.answers["raw"](b"+OK\r\n")

    def info(self, sid: bytes) -> Any:
        lines = {"session_idx": 1, "value_dim": int(self.shape["dim"]), "v_format": self.shape["fmt"].decode()}
        lines |= {"num_layers": L, "heads": int(self.shape["HEADS"])}
        lines |= {f"layer_{i}_tokens": int(self.shape["ROWS"]) for i in range(L)}
        if self.infos:
            lines |= self.infos.pop(0)
        return "".join(f"{name}:{value}\r\n" for name, value in lines.items() if value is not None)

    def fetch(self, sid: bytes, *rest: bytes) -> Any:
        out = []
        for layer in range(L):
            fault = self.faults.get((sid[-3:], layer), "none")
            if fault == "hang up":
                return self.answers["hang up"]
            if fault == "lost":
                continue
            out.append(self.answer(self.rows[sid, layer], rest[-1]) if fault == "none" else fault)
        return out

    def answer(self, rows: bytes, words: bytes) -> bytes:
        """Rows as the server sends them: FMT RAW says first what they are."""
        if words != b"RAW":
            return rows
        dim, count = int(self.shape["dim"]), int(self.shape["ROWS"])
        held = raw.Segment(FORMATS[self.shape["fmt"].decode()], 0, count, len(rows))
        return raw.pack(dim, 0, count, 0.0, [held]) + rows


@pytest.fixture
def store(byte_server: Any, answers: Any) -> Iterator[tuple[Client, FaultyStore, Any]]:
    server = byte_server()
    server.answer = faulty = FaultyStore(answers)
    with Client(host="127.0.0.1", port=server.port, timeout=20) as client:
        yield client, faulty, server


@pytest.mark.parametrize(("name", "kind"), DTYPES)
@pytest.mark.parametrize("form", ["array", "layers", "by token"])
def test_every_word_comes_back(store: Any, name: str, kind: Any, form: str) -> None:
    client, faulty, server = store
    k, v = words(kind, 1), words(kind, 2)
    sent: Any = (k, v)
    if form == "layers":
        sent = (list(k), list(v))
    elif form == "by token":
        sent = tuple(np.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for a in (k, v))
    client.store("ns", *sent, dtype=name, digest="ab12", rope=1e6, scope="s", parent="p", prefill_ms=7)
    register = next(argv for argv in server.seen if argv[0] == b"KV.PREFIX.REGISTER")
    fmt = {"float16": b"fp16", "float32": b"fp32", "bfloat16": b"bf16"}[name]
    assert register[1:4] == [b"ns", b"16", fmt]
    assert faulty.shape["ROWS"] == b"5"
    assert faulty.shape["LAYERS"] == b"3"
    assert faulty.shape["HEAD_DIM"] == b"8"
    assert faulty.shape["DIGEST"] == b"ab12"
    assert faulty.shape["ROPE"] == b"1000000.0"
    # One row is one token, all heads of it.
    assert faulty.rows[b"ns_pk", 1] == np.ascontiguousarray(k[1].transpose(1, 0, 2)).tobytes()
    got = client.fetch("ns")
    assert got.dtype == name
    assert got.k.shape == got.v.shape == (L, H, N, D)
    assert same_bits(got.k, k)
    assert same_bits(got.v, v)


@pytest.mark.parametrize(("name", "kind"), DTYPES)
@pytest.mark.parametrize("form", ["array", "by token", "layers"])
def test_fetching_into_out_takes_one_flight(store: Any, name: str, kind: Any, form: str) -> None:
    client, _, server = store
    k, v = words(kind, 1), words(kind, 2)
    client.store("ns", k, v, dtype=name)
    out: Any = (np.zeros_like(k), np.zeros_like(v))
    if form == "by token":
        out = tuple(np.zeros((L, N, H, D), kind).transpose(0, 2, 1, 3) for _ in range(2))
    elif form == "layers":
        out = tuple([np.zeros((N, H, D), kind).transpose(1, 0, 2) for _ in range(L)] for _ in range(2))
    server.seen.clear()
    got = client.fetch("ns", out=out, dtype=name)
    assert got.k is out[0]
    assert got.v is out[1]
    assert same_bits(np.stack(list(out[0])), k)
    assert same_bits(np.stack(list(out[1])), v)
    assert [argv[0] for argv in server.seen].count(b"V.FETCH") == 2
    assert server.seen[0][0] == b"KV.PREFIX.LOOKUP"


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("side", [b"_pk", b"_pv"])
@pytest.mark.parametrize("fault", [None, b"", b"short", bytes(2 * N * H * D - 2), bytes(4 * N * H * D), "lost"])
def test_b7_a_short_or_missing_layer_raises(store: Any, side: bytes, fault: Any, with_out: bool) -> None:
    client, faulty, _ = store
    k = words(np.float16, 1)
    client.store("ns", k, k)
    faulty.faults[side, 1] = fault
    out = (np.zeros_like(k), np.zeros_like(k)) if with_out else None
    with pytest.raises(IncompleteError, match=r"prefix 'ns': "):
        client.fetch("ns", out=out)
    faulty.faults.clear()
    assert same_bits(client.fetch("ns", out=out).k, k)


def test_b7_a_server_lost_in_the_middle_raises(store: Any) -> None:
    client, faulty, _ = store
    k = words(np.float16, 1)
    client.store("ns", k, k)
    faulty.faults[b"_pv", 0] = "hang up"
    with pytest.raises(ConnectionLostError):
        client.fetch("ns")


CHANGED: list[tuple[list[dict[str, Any]], str]] = [
    ([{}, {}, {"session_idx": 2}, {}], "changed while it was fetched"),
    ([{}, {"layer_0_tokens": 4}], "hold .4, 5. rows"),
    ([{"layer_2_tokens": None}, {}], "hold .0, 5. rows"),
    ([{}, {f"layer_{i}_tokens": 4 for i in range(L)}], "K is .* V is"),
]


@pytest.mark.parametrize(("infos", "message"), CHANGED)
def test_b9_uneven_or_changing_prefixes_raise(store: Any, infos: list[dict[str, Any]], message: str) -> None:
    client, faulty, _ = store
    k = words(np.float16, 1)
    client.store("ns", k, k)
    faulty.infos = infos
    with pytest.raises(IncompleteError, match=message):
        client.fetch("ns")


def test_a_miss_says_why(store: Any) -> None:
    client, faulty, _ = store
    k = words(np.float16, 1)
    client.store("ns", k, k)
    faulty.found = b"+MISS\r\n"
    for out in (None, (np.zeros_like(k), np.zeros_like(k))):
        with pytest.raises(PrefixMissError, match="'ns': dropped 3 s ago"):
            client.fetch("ns", out=out)
    assert not client.lookup("ns")


def test_nothing_is_written_behind_a_refused_register(store: Any) -> None:
    client, faulty, server = store
    faulty.refuse = "MISMATCH ns holds another digest"
    with pytest.raises(MismatchError, match="another digest"):
        client.store("ns", words(np.float16, 1), words(np.float16, 2), digest="00")
    assert not any(argv[0] == b"V.STOREBATCH" for argv in server.seen)


def test_out_of_another_shape_or_dtype_is_a_mismatch(store: Any) -> None:
    client, _, _ = store
    k = words(np.float16, 1)
    client.store("ns", k, k)
    for wrong in (np.zeros((L, H, N + 1, D), np.float16), np.zeros((L, H, N, D), np.float32)):
        with pytest.raises(MismatchError, match="MISMATCH prefix 'ns' is"):
            client.fetch("ns", out=(wrong, wrong.copy()))


def test_a_prefix_without_heads_needs_the_argument(store: Any) -> None:
    client, faulty, _ = store
    k = words(np.float16, 1)
    client.store("ns", k, k)
    faulty.infos = [{"heads": None}] * 2
    with pytest.raises(ValueError, match="without HEADS: say heads="):
        client.fetch("ns")
    faulty.infos = [{"heads": None}] * 4
    assert same_bits(client.fetch("ns", heads=2).k, k)


def test_an_old_server_error_is_passed_on(store: Any) -> None:
    client, _, server = store
    server.answer = lambda peer, argv: (
        server.answer_error if argv[0].startswith((b"KV", b"V.")) else store[1].answers["ordinary"](peer, argv)
    )
    server.answer_error = store[1].answers["error"]("ERR unknown command 'KV.PREFIX.LOOKUP'")
    with pytest.raises(CommandError, match="unknown command"):
        client.fetch("ns")


f16 = np.zeros((L, H, N, D), np.float16)
REFUSED: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (f16, f16[:, :, :3], {}, ValueError, "k and v differ"),
    (f16, f16.astype(np.float32), {}, TypeError, "v is float32"),
    (f16[0], f16[0], {}, ValueError, "must be .layers, heads, tokens, head_dim."),
    (f16[:, :, :0], f16[:, :, :0], {}, ValueError, "a layer has shape"),
    ([], [], {}, ValueError, "k has no layers"),
    ([f16[0], f16[0, :1]], f16, {}, ValueError, "the layers of k differ"),
    (f16.view(np.uint16), f16.view(np.uint16), {}, TypeError, 'pass dtype="bfloat16"'),
    (f16, f16, {"dtype": "float32"}, TypeError, "cannot use float16 as float32"),
    (f16.astype(np.float64), f16.astype(np.float64), {}, TypeError, "cannot use float64"),
    (f16.astype(">f2"), f16.astype(">f2"), {}, TypeError, "cannot use"),
    ([f16[0].tolist()], [f16[0].tolist()], {}, TypeError, "must be numpy arrays"),
]


@pytest.mark.parametrize(("k", "v", "options", "kind", "message"), REFUSED)
def test_arrays_that_do_not_fit_are_refused_before_a_connection_is_opened(
    k: Any, v: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    nowhere = Client(path="/nowhere/pion.sock")
    with pytest.raises(kind, match=message):
        nowhere.store("ns", k, v, **options)


def test_rows_of_a_fetched_layer_are_a_view() -> None:
    by_token = np.zeros((N, H, D), np.float16).transpose(1, 0, 2)
    assert np.shares_memory(tensors.rows_of(by_token), by_token)
    assert not np.shares_memory(tensors.rows_of(f16[0]), f16)
