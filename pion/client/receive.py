"""Layers received one after the other, as they are stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final

import numpy as np

from pion.client.decode import most_bytes
from pion.client.formats import belongs
from pion.wire import raw

__all__ = ["Receiver"]

Place = Callable[[int, raw.Stored, memoryview], None]
_BUFFERS: Final = 3  # one is received into, one is placed from, one is between

Home = Callable[[int], memoryview]


class Receiver:
    """Where the parser puts the bulks of one V.FETCH ... BATCH ... FMT RAW; see ``ReplyParser.expect``.

    All layers are received into the same memory; each is handed to `place` when the next one begins to arrive. A layer
    that is as long as its words would be is received straight into their place, and moved only if it is something else.

    Args:
        what: names the side in errors.
        layers, rows, dim: what must come: rows from 0 on, of so many values.
        place: takes a layer, what its answer holds, and the answer.
        names: what errors call a layer, when it is not its number.
        worker: of one thread, which then places the layers while further ones arrive.
        words: a format of plain words, and where those of a layer belong; None: nothing is received in place.
    """

    def __init__(
        self, what: str, layers: int, rows: int, dim: int, place: Place, words: tuple[int, Home] | None = None,
        worker: Executor | None = None, names: Callable[[int], str] | None = None,
    ) -> None:  # fmt: skip
        self._what, self._name = what, names or f"layer {{}} of {what}".format
        self._layers, self._rows, self._dim, self._place = layers, rows, dim, place
        self._words, self._worker = words, worker
        self._placing: deque[tuple[Future[None], memoryview]] = deque()
        self._most = most_bytes(rows, dim)
        self._head = memoryview(bytearray(raw.header_length(1)))
        self._memory = memoryview(b"")
        self._got: tuple[int, memoryview, memoryview | None] | None = None
        self._found: dict[int, set[int]] = {}
        self._wrong = ""
        self._known: dict[tuple[bytes, int], raw.Stored] = {}

    def __call__(self, layer: int, nbytes: int) -> Any:
        self._flush()
        if not (layer < self._layers and 0 < nbytes <= self._most):
            return None  # nothing, or nothing that could be right: the layer stays missing
        if self._words is not None:
            home = self._words[1](layer)
            if nbytes == self._head.nbytes + home.nbytes:
                self._got = layer, self._head, home
                return self._head, home
        if self._worker is not None:
            self._memory = self._spare()
        if nbytes > self._memory.nbytes:
            self._memory = np.empty(nbytes, np.uint8).data
        self._got = layer, self._memory[:nbytes], None
        return self._got[1]

    def _spare(self) -> memoryview:
        """Memory that nothing is placed from any more; none of it while there are fewer than `_BUFFERS`."""
        if len(self._placing) < _BUFFERS - 1 and not (self._placing and self._placing[0][0].done()):
            return memoryview(b"")
        done, memory = self._placing.popleft()
        self._settle(done)
        return memory

    def _settle(self, done: Future[None]) -> None:
        try:
            done.result()
        except ValueError as error:
            self._wrong = self._wrong or str(error)

    def _flush(self) -> None:
        if self._got is None:
            return
        (layer, answer, home), self._got = self._got, None
        try:
            stored = self._parsed(answer, home.nbytes if home is not None else 0)
            if (stored.start, stored.rows, stored.dim) != (0, self._rows, self._dim):
                got = f"rows {stored.start} to {stored.start + stored.rows} of {stored.dim} values"
                raise ValueError(f"{got}, not 0 to {self._rows} of {self._dim}")
            if home is None and self._worker is not None:
                done = self._worker.submit(self._place, layer, stored, answer)
                self._placing.append((done, self._memory))
                self._memory = memoryview(b"")
            elif home is None:
                self._place(layer, stored, answer)
            elif self._words is None or [s.fmt for s in stored.segments] != [self._words[0]]:
                self._place(layer, stored, memoryview(bytes(answer) + bytes(home)))
            self._found[layer] = {segment.fmt for segment in stored.segments if not segment.missing}
        except ValueError as error:
            self._wrong = self._wrong or f"{self._name(layer)}: {error}"

    def _parsed(self, answer: memoryview, body: int) -> raw.Stored:
        """`raw.parse`, once for answers that begin alike: the layers of a prefix mostly do."""
        key = bytes(answer[: self._head.nbytes]), answer.nbytes + body
        found = self._known.get(key)
        if found is None:
            found = raw.parse(answer, body)
            if raw.header_length(len(found.segments)) == self._head.nbytes:
                self._known[key] = found
        return found

    def finish(self, formats: Sequence[str]) -> str:
        """Place the last layer. What is wrong with what was received; an empty text when nothing is.

        Args:
            formats: of the layers, as V.INFO told them: an answer in another format is wrong.
        """
        self._flush()
        while self._placing:
            self._settle(self._placing.popleft()[0])
        if not self._wrong and len(self._found) != self._layers:
            self._wrong = f"{len(self._found)} of {self._layers} layers of {self._what} came"
        for layer, found in self._found.items():
            strange = [fmt & 255 for fmt in found if not belongs(fmt, formats[layer])]
            if strange:
                self._wrong = self._wrong or f"{self._name(layer)}: format {strange[0]}, not {formats[layer]}"
        return self._wrong
