"""Encoded chunks in memory, their manifest on disk, and caches put together from them.

A *pack* is the K/V of a chunk of tokens that was computed behind a *stub*, an instruction that all packs share. The
manifest is a JSON file that tells another process which chunks there are::

    {"chunk id": {"namespace": ..., "tokens": n, "backend": "inproc" or "pion", "digest": ..., "content": ...,
                  "encoded_at": position}}

``digest`` is `pion.client.identity.prefix_digest` over the model and the tokens, those of the stub included;
``content`` the SHA-256 of the chunk's tokens alone (u32 little endian), so that a process whose stub is another one can
tell whether an id still means what it took in; ``encoded_at``, of packs only, the position of the chunk's first token
when it was computed, which is the length of the stub.
"""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pion.client.caches import PionMlxCompatError, mlx_modules, new_cache
from pion.client.restore import ROOM
from pion.client.rotate import Mover
from pion.limits import MAX_NAMESPACE, MAX_ROWS

__all__ = ["STEP", "Entry", "Manifest", "Pack", "Rows", "assembled", "feed", "plain_cache", "rows_of"]

STEP: Final = 512  # tokens of a forward pass

Entry = dict[str, Any]
Rows = list[tuple[Any, Any]]
"""K and V of each layer, (1, H, T, D)."""


@dataclass(frozen=True)
class Pack:
    """A chunk that this process knows.

    Attributes:
        ids: u32, what was computed: the stub, if there is one, and the chunk.
        encoded_at: the tokens of the stub, whose rows are not kept; 0 = a chunk that opens a prompt.
        digest: of the model and `ids`.
        rows: of the chunk alone; None: they are on the server.
    """

    ids: np.ndarray[Any, Any]
    encoded_at: int
    digest: str
    rows: Rows | None


class Manifest:
    """The chunks by id; in a file too if there is a path, which several processes may share.

    Every look sees what the last process wrote: the file is read again when it is another one than the one read.

    Raises:
        ValueError: the file is there and is no manifest, here and in every method. It is left as it is.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._entries: dict[str, Entry] = {}
        self._seen: tuple[int, int, int] | None = None  # which file `_entries` are from; None: there was none
        self._current()

    def _current(self) -> dict[str, Entry]:
        """What is listed now."""
        if self._path is None:
            return self._entries
        try:
            if self._seen is None or _which(self._path.stat()) != self._seen:
                with self._path.open("rb") as file:
                    which, text = _which(os.fstat(file.fileno())), file.read()
                self._entries, self._seen = _parsed(text, self._path), which
        except FileNotFoundError:
            self._entries, self._seen = {}, None
        return self._entries

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _change(self, change: Callable[[dict[str, Entry]], Any]) -> None:
        if self._path is None:
            change(self._entries)
            return
        with self._alone(self._path):
            entries = dict(self._current())  # another process may have changed it
            change(entries)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._path.parent, prefix=self._path.name, suffix=".tmp", delete=False
            ) as out:
                json.dump(entries, out, indent=1)
            if self._path.exists():  # a later time than any before it: an inode number may come back
                later = max(time.time_ns(), self._path.stat().st_mtime_ns + 1)
                os.utime(out.name, ns=(later, later))
            Path(out.name).replace(self._path)
            self._seen = None

    def set(self, chunk_id: str, entry: Entry) -> None:
        """Add or replace a chunk."""
        if self.get(chunk_id) != entry:
            self._change(lambda entries: entries.update({chunk_id: entry}))

    def get(self, chunk_id: str) -> Entry | None:
        """What is known of a chunk, also from other processes."""
        return self._current().get(chunk_id)

    def remove(self, chunk_id: str) -> bool:
        """Forget a chunk; whether it was known."""
        known = self.get(chunk_id) is not None
        if known:
            self._change(lambda entries: entries.pop(chunk_id, None))
        return known

    def __len__(self) -> int:
        return len(self._current())


def _which(status: os.stat_result) -> tuple[int, int, int]:
    """What tells one version of the file from the next: each has an inode of its own and a later time."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def _parsed(text: bytes, path: Path) -> dict[str, Entry]:
    """The chunks of a manifest file. Raises ValueError."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest of chunks: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} is not a manifest of chunks: it holds no object of chunks by id")
    for chunk_id, entry in read.items():
        wrong = _wrong(entry)
        if wrong:
            raise ValueError(f"{path} is not a manifest of chunks, or is damaged: {chunk_id!r} has {wrong}")
    return read


def _wrong(entry: Any) -> str:
    """What keeps a manifest's value from being an entry, in words; "" = nothing."""
    if not isinstance(entry, dict):
        return "no fields"
    for name in ("namespace", "tokens", "backend"):
        if name not in entry:
            return f"no {name}"
    for name, value in entry.items():
        if name in ("tokens", "encoded_at"):
            good, want = type(value) is int and 1 <= value <= MAX_ROWS, f"a number from 1 to {MAX_ROWS}"
        elif name == "backend":
            good, want = value in ("inproc", "pion"), "'inproc' or 'pion'"
        elif name == "namespace":
            size = len(value.encode("utf-8", "replace")) if isinstance(value, str) else 0
            whole = not any("\ud800" <= letter <= "\udfff" for letter in value) if size else False
            good, want = whole and size <= MAX_NAMESPACE, f"a text of 1 to {MAX_NAMESPACE} bytes"
        elif name in ("digest", "content"):
            good, want = isinstance(value, str), "a text"
        else:
            continue  # a later version's
        if not good:
            return f"{name} {reprlib.repr(value)}, which is not {want}"
    return ""


def plain_cache(model: Any) -> list[Any]:
    """A fresh prompt cache whose rows can be cut and put together.

    Raises:
        PionMlxCompatError: a layer keeps something else than a plain ``KVCache``; the text names it.
    """
    _, module = mlx_modules()
    cache = new_cache(model)
    others = sorted({type(layer).__name__ for layer in cache if type(layer) is not module.KVCache})
    if others:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        raise PionMlxCompatError(f"{name} has {', '.join(others)}: chunks can be cut from plain KVCache layers only")
    return cache


def rows_of(cache: Sequence[Any], first: int, last: int) -> Rows:
    """Copies of some tokens' rows, so that they do not keep the whole cache alive."""
    mx, _ = mlx_modules()
    rows = [tuple(mx.contiguous(side[:, :, first:last]) for side in (layer.keys, layer.values)) for layer in cache]
    mx.eval(rows)
    return rows


def assembled(model: Any, segments: Sequence[tuple[Rows, int, int]], mover: Mover | None = None) -> list[Any]:
    """A prompt cache of rows that follow each other, in memory of its own with `ROOM` to append.

    Args:
        model: whose cache it is.
        segments: (rows, where their first token was computed, where it shall stand), without gaps from 0 on.
        mover: turns the keys of those that move.
    """
    mx, _ = mlx_modules()
    cache = plain_cache(model)
    count = 0
    for rows, old, new in segments:
        if new != count or (old != new and mover is None):
            raise ValueError(f"rows for position {new} cannot stand at {count}")
        count += rows[0][0].shape[2]
    for index, layer in enumerate(cache):
        keys, values = [], []
        for rows, old, new in segments:
            k, v = rows[index]
            keys.append(k if mover is None else mover.keys(index, k, old, new))
            values.append(v)
        for side in (keys, values):
            _, heads, _, dim = side[0].shape
            side.append(mx.zeros((1, heads, ROOM, dim), side[0].dtype))
        layer.keys, layer.values = mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)
        layer.offset = count
    mx.eval([(layer.keys, layer.values) for layer in cache])
    return cache


def feed(model: Any, cache: list[Any], ids: Sequence[int]) -> None:
    """Compute the K/V of tokens that follow those in a cache, and append it."""
    mx, _ = mlx_modules()
    for start in range(0, len(ids), STEP):
        model(mx.array(ids[start : start + STEP])[None], cache=cache)
        mx.eval([(layer.keys, layer.values) for layer in cache])
