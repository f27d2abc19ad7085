"""Arguments that chance puts together: an answer or a refusal in words, never an internal error."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.commands import Dispatcher, table
from pion.config import Options
from pion.store.engine import Engine
from tests.support.attention import backend
from tests.support.memory import MemoryClient

NAMES = sorted(name for name in table.COMMANDS if name.startswith(b"attend.prefix."))
ROW = np.arange(8, dtype="<f4").tobytes()
STRANGE = struct.pack("<8f", float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, 0, 1)
INDEX = struct.pack("<i", 1)
ARGUMENTS = st.sampled_from(
    [b"", b"s", b"0", b"1", b"1", b"1", b"2", b"8", b"8", b"-1", b"x", b"9223372036854775807", b"9223372036854775808",
     ROW, ROW * 2, STRANGE, STRANGE * 2, ROW[:5], INDEX, INDEX * 2, b"\0", b"\0\0", b"\xff", b"WITHMASS", b"WITHLSE",
     b"SINKS"]
)  # fmt: skip
# Commands that are nearly right: chance would hardly put them together.
FORMS: dict[bytes, tuple[bytes, ...]] = {
    b"attend.prefix.store": (b"s", b"0", b"1", b"1", b"8", ROW, ROW),
    b"attend.prefix.query": (b"s", b"0", b"1", b"8", b"1", ROW, b"-1", b"SINKS", INDEX),
    b"attend.prefix.query_fused": (b"s", b"0", b"2", b"8", b"1", b"1", ROW * 2, ROW, ROW, b"\0\0", b"0"),
    b"attend.prefix.query_sparse": (b"s", b"0", b"1", b"8", b"1", ROW, INDEX, INDEX, b"0", b"WITHMASS"),
    b"attend.prefix.query_sparse_auto": (b"s", b"0", b"1", b"8", b"1", b"1", b"1", ROW, b"\0", b"-1", b"1"),
    b"attend.prefix.query_sparse_auto_fused": (
        b"s", b"0", b"1", b"8", b"1", b"1", b"1", b"1", ROW, ROW, ROW, b"", b"-1", b"0", b"WITHMASS",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["cpu", "mlx", "twins"])
@settings(max_examples=200)
@given(data=st.data(), half=st.booleans())
def test_no_internal_errors(name: str, data: Any, half: bool) -> None:
    made = backend(name, half)
    with Engine(None, memory_only=True, ticker=False) as engine, pytest.MonkeyPatch.context() as patched:
        patched.setattr("pion.attention.engine.make", lambda *_: made)
        client = MemoryClient(Dispatcher(engine, Options(kvcache=True, metal_attention_fp16=half)))
        blob = data.draw(st.sampled_from([ROW * 2, STRANGE * 2]))
        client.raw(b"attend.prefix.store", b"s", 0, 1, 2, 8, blob, ROW * 2)
        for _ in range(4):
            name = data.draw(st.sampled_from(NAMES))
            form = list(FORMS.get(name, ()))
            for _ in range(data.draw(st.integers(0, 2))):
                if form:
                    form[data.draw(st.integers(0, len(form) - 1))] = data.draw(ARGUMENTS)
            words = form or data.draw(st.lists(ARGUMENTS, max_size=12))
            got = client.raw(name, *words)
            assert got[:1] in b"+-:$*", (name, words, got)
            assert b"internal error" not in got, (name, words, got)
