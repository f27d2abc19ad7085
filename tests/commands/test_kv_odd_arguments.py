"""Odd arguments to V, KV.PREFIX, SSM and PION: always an answer or a refusal in words, never an internal error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pion import errors
from pion.commands import table
from pion.commands.dispatch import Dispatcher
from pion.store.engine import Engine
from pion.wire.resp import Err
from tests.support.door import finished
from tests.support.memory import MemoryConn

NUMBERS = "0 1 2 4 64 79 80 -1 8192 8193 199999 200000 9223372036854775807 9223372036854775808 -9223372036854775808 007"
WORDS = (
    "a ns ns_pk ns_pv _pk _pv raw fp16 int8 native fp32 bf16 turbo4 bf16_rope_fp8_body VQUANT SCHEMA = ,, "
    "fmt=fp16,dim=4 RANGE BATCH FMT NATIVE RAW F16 BF16 F32 BLOCKS ROWS LAYERS DIGEST abcd REPLACE SCOPE PARENT "
    "MATCH * [ [^ CURSOR COUNT TOKENS PREFILL_MS 1e400 nan inf 0x10 RESET /abs .. sub/dir ROPE NONE HEADS HEAD_DIM é"
)
POOL = [
    *(word.encode() for word in f"{NUMBERS} {WORDS}".split()),
    *(b"", b" ", b"\xff\xfe", b"a\r\nb", b"\x00", b"x" * 201, b"x" * 5000),
    *(bytes(n) for n in (7, 8, 16, 32, 64)),
    b"\x00\x00\x80\x7f" * 4,
    b"\x00\x7c" * 4,
]
ANY = object()
SHAPES: list[list[Any]] = [
    [b"V.CREATE", ANY, ANY, b"VQUANT", ANY],
    [b"V.STOREBATCH", b"ns_pk", ANY, ANY, ANY, ANY, b"FMT", ANY],
    [b"V.FETCH", b"ns_pk", ANY, b"RANGE", ANY, ANY, b"FMT", ANY],
    [b"V.FETCH", b"ns_pk", b"BATCH", ANY, ANY, ANY, b"FMT", ANY],
    [b"KV.PREFIX.REGISTER", ANY, b"4", b"fp16", b"ROWS", ANY, b"LAYERS", ANY],
    [b"KV.PREFIX.REGISTER", ANY, b"4", ANY, b"BLOCKS", ANY, ANY, ANY],
    [b"KV.PREFIX.MEMBERSHIP", b"ns", ANY, ANY],
    [b"SSM.PREFIX.STORE", ANY, ANY, ANY],
]
NAMES = [
    record.name.encode() for record in table.COMMANDS.values() if record.group in ("vstore", "prefix", "state", "pion")
]


def _argv(rng: random.Random) -> list[bytes]:
    if rng.random() < 0.5:
        return [rng.choice(NAMES), *rng.choices(POOL, k=rng.randint(0, 9))]
    argv = [rng.choice(POOL) if word is ANY else word for word in rng.choice(SHAPES)]
    return argv if rng.random() < 0.8 else argv[: rng.randint(1, len(argv))]


@pytest.mark.parametrize("seed", range(4))
def test_no_arguments_make_an_internal_error(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Engine(tmp_path / "data", ticker=False) as engine:
        dispatcher, conn = Dispatcher(engine), MemoryConn()
        dispatcher.connected(conn)
        for _ in range(1500):
            argv = _argv(rng)
            value = finished(dispatcher(conn, argv))
            if isinstance(value, Err):
                assert value.value != errors.INTERNAL.encode(), argv
                assert value.value.split(b" ")[0] in (b"ERR", b"MISMATCH"), (argv, value.value)
