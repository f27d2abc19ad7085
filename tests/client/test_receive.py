"""Where stored layers are received, and what is refused of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion.client.decode import Decoder
from pion.client.receive import Receiver
from pion.limits import FORMATS
from pion.wire import raw
from pion.wire.resp import ReplyParser, encode
from tests.support.stored import answer, encoded

LAYERS, ROWS, DIM = 3, 4, 64
FP32, FP16, INT8 = (FORMATS[name] for name in ("fp32", "fp16", "int8"))


def values(layer: int) -> Any:
    return np.random.default_rng(layer).normal(size=(ROWS, DIM)).astype(np.float32)


def layer_of(fmt: int, layer: int, **changes: Any) -> bytes:
    told = {"dim": DIM, "start": 0, "rows": ROWS, **changes}
    return bytes(answer(**told, segments=[(fmt, told["start"], told["rows"], encoded(fmt, values(layer)))]))


class Side:
    """Arrays of one side, and the receiver that fills them."""

    def __init__(self, *, in_place: bool) -> None:
        self.arrays = [np.zeros((ROWS, DIM), np.float32) for _ in range(LAYERS)]
        self.placed: list[int] = []
        self.decoder = Decoder(DIM, "float32")
        words = (FP32, lambda layer: self.arrays[layer].reshape(-1).view(np.uint8).data) if in_place else None
        self.receiver = Receiver("K", LAYERS, ROWS, DIM, self.place, words)

    def place(self, layer: int, stored: raw.Stored, data: memoryview) -> None:
        self.placed.append(layer)
        for first, rows in self.decoder.pieces(stored, data):
            self.arrays[layer][first : first + len(rows)] = rows

    def take(self, layers: list[bytes | None], piece: int = 1 << 20) -> None:
        """A reply with these bulks, fed in pieces."""
        parser = ReplyParser()
        parser.expect(self.receiver)
        data = encode(layers, 2)
        replies = [reply for i in range(0, len(data), piece) for reply in parser.feed(data[i : i + piece])]
        assert len(replies) == 1


@pytest.mark.parametrize("piece", [1 << 20, 100, 1])
@pytest.mark.parametrize("in_place", [True, False])
def test_words_and_other_formats_end_in_the_same_arrays(in_place: bool, piece: int) -> None:
    side = Side(in_place=in_place)
    side.take([layer_of(FP32, 0), layer_of(INT8, 1), layer_of(FP32, 2)], piece)
    assert side.receiver.finish(["fp32", "int8", "fp32"]) == ""
    assert side.placed == ([1] if in_place else [0, 1, 2])
    assert np.array_equal(side.arrays[0], values(0))
    assert np.array_equal(side.arrays[2], values(2))
    assert np.abs(side.arrays[1] - values(1)).max() < 0.02


def test_what_has_the_length_of_the_words_but_is_something_else_is_decoded() -> None:
    side = Side(in_place=True)
    loose, rest = encoded(FP16, values(0)[:2]), encoded(FP32, values(0)[2:3])
    # Two rows as fp16, one as fp32, one missing: padded by a longer header to the length of four fp32 rows.
    odd = bytes(answer(DIM, 0, ROWS, [(FP16, 0, 2, loose), (FP32, 2, 1, rest), (FP32, 3, 1, None)]))
    assert len(odd) != len(layer_of(FP32, 0))
    same = raw.pack(DIM, 0, ROWS, 0.0, [raw.Segment(FORMATS["bf16"], 0, 2 * ROWS, 4 * ROWS * DIM)])
    same += np.repeat((values(0).view(np.uint32) >> 16).astype(np.uint16), 2, axis=0).tobytes()
    assert len(same) == len(layer_of(FP32, 0))
    side.take([odd, same, layer_of(FP32, 2)])
    assert side.receiver.finish(["fp16", "bf16", "fp32"]) == "layer 0 of K: format 8, not fp16"
    assert side.placed == [0, 1]
    assert np.array_equal(side.arrays[0][3], np.zeros(DIM))
    assert np.array_equal(side.arrays[0][2], values(0)[2])
    assert np.abs(side.arrays[1] - np.repeat(values(0), 2, axis=0)[:ROWS]).max() < 0.05


@pytest.mark.parametrize(
    ("layers", "formats", "text"),
    [
        ([layer_of(INT8, 0), layer_of(INT8, 1), None], ["int8"] * 3, "2 of 3 layers of K came"),
        ([layer_of(INT8, 0), layer_of(INT8, 1)], ["int8"] * 3, "2 of 3 layers of K came"),
        ([layer_of(INT8, 0), b"", layer_of(INT8, 2)], ["int8"] * 3, "2 of 3 layers of K came"),
        ([layer_of(INT8, 0), bytes(400), layer_of(INT8, 2)], ["int8"] * 3, "layer 1 of K: not an answer to FMT RAW"),
        ([layer_of(INT8, 0)] * 2 + [layer_of(INT8, 2)[:-1]], ["int8"] * 3, "layer 2 of K: FMT RAW"),
        ([layer_of(INT8, 0)] * 2 + [layer_of(FP16, 2)], ["int8"] * 3, "layer 2 of K: format 2, not int8"),
        ([layer_of(FP32, 0)] * 3, ["fp32", "int8", "fp32"], "layer 1 of K: format 8, not int8"),
        ([layer_of(INT8, 0, start=1)] * 3, ["int8"] * 3, "layer 0 of K: rows 1 to 5 of 64 values, not 0 to 4 of 64"),
        ([layer_of(INT8, 0), bytes(1 << 20), layer_of(INT8, 2)], ["int8"] * 3, "2 of 3 layers of K came"),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_wrong_is_said(layers: list[bytes | None], formats: list[str], text: str, in_place: bool) -> None:
    side = Side(in_place=in_place)
    side.take(layers)
    assert text in side.receiver.finish(formats)
    assert text in side.receiver.finish(formats)


def test_more_layers_than_were_asked_for_are_left_alone() -> None:
    side = Side(in_place=True)
    side.take([layer_of(FP32, layer % LAYERS) for layer in range(LAYERS + 2)])
    assert side.receiver.finish(["fp32"] * LAYERS) == ""
