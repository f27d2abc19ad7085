"""What a store must hold after a crash: a plain model, and the states each object may be in.

One connection sends operations in order. When the server dies, the first `acked` of them were answered and the first
`sent` had arrived completely. Every object (a string, a hash, an entry) must then be in the state it had after the
acknowledged operations, or after one of the unacknowledged ones that touch it: those may have happened or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.raw import Raw, ReplyError, frame

Target = tuple[str, bytes]


@dataclass(frozen=True)
class Entry:
    """One prefix: declared shape (rows, layers) or None, and the fp16 rows of each (side, layer), from row 0 on."""

    dim: int
    shape: tuple[int, int] | None
    data: tuple[tuple[tuple[bytes, int], bytes], ...] = ()

    def rows(self, side: bytes, layer: int) -> bytes:
        return dict(self.data).get((side, layer), b"")

    def store(self, side: bytes, layer: int, start: int, blob: bytes) -> Entry:
        width = 2 * self.dim
        old = self.rows(side, layer)
        assert start * width <= len(old), "the model stores without gaps"
        new = old[: start * width] + blob + old[start * width + len(blob) :]
        return Entry(self.dim, self.shape, tuple(sorted({**dict(self.data), (side, layer): new}.items())))

    @property
    def hit(self) -> bool:
        if self.shape is None:
            return True
        rows, layers = self.shape
        return all(len(self.rows(s, n)) >= rows * 2 * self.dim for s in (b"_pk", b"_pv") for n in range(layers))

    @property
    def nbytes(self) -> int:
        return sum(len(blob) for _, blob in self.data)

    @property
    def k_tokens(self) -> int:
        return sum(len(blob) // (2 * self.dim) for (side, _), blob in self.data if side == b"_pk")


@dataclass(frozen=True)
class Op:
    target: Target | None
    request: bytes
    after: Any  # the target's state once it is done
    refused: bool = False


@dataclass
class Model:
    """The state by object, and a generator of random operations on it.

    Attributes:
        state: what is there now, after everything generated so far.
        base: what was there after the last restart.
    """

    rng: random.Random
    state: dict[Target, Any] = field(default_factory=dict)
    base: dict[Target, Any] = field(default_factory=dict)

    # --- operations ----------------------------------------------------------------------------------------------

    def ops(self, count: int) -> list[Op]:
        makers: list[tuple[int, Callable[[], Op]]] = [
            (46, self._storebatch),
            (12, self._register),
            (10, self._drop),
            (16, self._set),
            (5, self._del),
            (5, self._hset),
            (4, self._hdel),
            (2, lambda: Op(None, frame("KV.PREFIX.COMMIT"), None)),
        ]
        weights, calls = zip(*makers, strict=True)
        out = []
        for make in self.rng.choices(calls, weights, k=count):
            op = make()
            if op.target is not None and not op.refused:
                self.state[op.target] = op.after
            out.append(op)
        return out

    def _shape(self, ns: bytes) -> tuple[int, tuple[int, int] | None]:
        number = int(ns[1:])
        return (64, 256, 8)[number % 3], None if number % 2 else (self._declared_rows(number), 2)

    @staticmethod
    def _declared_rows(number: int) -> int:
        return 4096 if number % 3 == 1 else 24

    def _ns(self) -> bytes:
        return b"p%d" % self.rng.randrange(8)

    def _register(self) -> Op:
        ns = self._ns()
        dim, shape = self._shape(ns)
        extra = ("ROWS", shape[0], "LAYERS", shape[1]) if shape else ()
        was = self.state.get(("entry", ns))
        request = frame("KV.PREFIX.REGISTER", ns, dim, "fp16", *extra)
        return Op(("entry", ns), request, was or Entry(dim, shape))

    def _drop(self) -> Op:
        ns = self._ns()
        return Op(("entry", ns), frame("KV.PREFIX.DROP", ns), None)

    def _storebatch(self) -> Op:
        ns = self._ns()
        dim, shape = self._shape(ns)
        was: Entry | None = self.state.get(("entry", ns))
        side, layer = self.rng.choice((b"_pk", b"_pv")), self.rng.randrange(2)
        have = len(was.rows(side, layer)) // (2 * dim) if was else 0
        if shape and self.rng.random() < 0.6:
            start, count = 0, shape[0]  # the whole layer, so that complete entries are common
        elif have and self.rng.random() < 0.3:
            start, count = self.rng.randrange(have), self.rng.randint(1, 32)
        else:
            start, count = have, self.rng.randint(1, 64)
        most = shape[0] if shape else 20_000
        start = min(start, most - 1)
        count = min(count, most - start)
        blob = self.rng.randbytes(2 * dim * count)
        request = frame("V.STOREBATCH", ns + side, layer, start, count, blob, "FMT", "F16")
        if was is None:
            return Op(("entry", ns), request, None, refused=True)
        return Op(("entry", ns), request, was.store(side, layer, start, blob))

    def _set(self) -> Op:
        key = b"k%d" % self.rng.randrange(12)
        size = self.rng.choice((0, 10, 300, 5_000, 5_000, 200_000))
        if self.rng.random() < 0.02:
            size = 2 << 20
        value = self.rng.randbytes(size)
        return Op(("string", key), frame("SET", key, value), value)

    def _del(self) -> Op:
        key = b"k%d" % self.rng.randrange(12)
        return Op(("string", key), frame("DEL", key), None)

    def _hset(self) -> Op:
        key, name, value = self._hash()
        was = dict(self.state.get(("hash", key)) or ())
        return Op(("hash", key), frame("HSET", key, name, value), tuple(sorted({**was, name: value}.items())))

    def _hdel(self) -> Op:
        key, name, _ = self._hash()
        was = dict(self.state.get(("hash", key)) or ())
        was.pop(name, None)
        return Op(("hash", key), frame("HDEL", key, name), tuple(sorted(was.items())) or None)

    def _hash(self) -> tuple[bytes, bytes, bytes]:
        rng = self.rng
        return b"h%d" % rng.randrange(3), b"f%d" % rng.randrange(3), rng.randbytes(rng.randrange(60))

    # --- after the crash -----------------------------------------------------------------------------------------

    def targets(self) -> list[Target]:
        return (
            [("string", b"k%d" % i) for i in range(12)]
            + [("hash", b"h%d" % i) for i in range(3)]
            + [("entry", b"p%d" % i) for i in range(8)]
        )

    def check(self, conn: Raw, ops: list[Op], acked: int, sent: int) -> None:
        """Reads everything back over `conn`, the first connection after the restart, and adopts what is there."""
        first = conn.fields("KV.PREFIX.INFO")
        keyspace = conn.fields("INFO", "keyspace")
        now = {target: self._read(conn, target) for target in self.targets()}
        for target, found in now.items():
            settled = self.base.get(target)
            allowed = []
            for i, op in enumerate(ops[:sent]):
                if op.target == target and not op.refused:
                    if i < acked:
                        settled = op.after
                    else:
                        allowed.append(op.after)
            if found not in [settled, *allowed]:
                raise AssertionError(
                    f"{target}: {_show(found)}, not {_show(settled)}"
                    + "".join(f" nor {_show(state)}" for state in allowed)
                    + f" (acked {acked}, sent {sent} of {len(ops)})"
                )
        entries = {ns: state for (kind, ns), state in now.items() if kind == "entry" and state is not None}
        for kind, ns in self.targets():
            if kind == "entry":
                hit = ns in entries and entries[ns].hit
                answer = conn.call("KV.PREFIX.LOOKUP", ns)
                assert answer == ("HIT" if hit else "MISS"), (ns, answer, _show(entries.get(ns)))
        # the first INFO already told the truth
        assert int(first["registered_prefixes"]) == len(entries)
        assert int(first["vstore_sessions"]) == 2 * len(entries)
        assert int(first["vstore_bytes"]) == sum(entry.nbytes for entry in entries.values())
        assert int(first["total_prefix_tokens"]) == sum(entry.k_tokens for entry in entries.values())
        keys = sum(1 for (kind, _), state in now.items() if kind != "entry" and state is not None)
        assert keyspace.get("db0", "keys=0,").startswith(f"keys={keys},")
        self.state = dict(now)
        self.base = dict(now)

    def _read(self, conn: Raw, target: Target) -> Any:
        kind, name = target
        if kind == "string":
            return conn.ok("GET", name)
        if kind == "hash":
            flat = conn.ok("HGETALL", name)
            return tuple(sorted(zip(flat[::2], flat[1::2], strict=True))) or None
        dim, shape = self._shape(name)
        data = {}
        infos = [conn.call("V.INFO", name + side) for side in (b"_pk", b"_pv")]
        if all(isinstance(info, ReplyError) for info in infos):
            return None
        for side, info in zip((b"_pk", b"_pv"), infos, strict=True):
            assert not isinstance(info, ReplyError), f"{name!r} has one side only: {infos}"
            lines = dict(line.split(":", 1) for line in info.decode().splitlines())
            assert (lines["value_dim"], lines["v_format"]) == (str(dim), "fp16")
            for layer in range(int(lines["num_layers"])):
                rows = int(lines.get(f"layer_{layer}_tokens", 0))
                if rows:
                    body = conn.ok("V.FETCH", name + side, layer, "RANGE", 0, rows, "FMT", "NATIVE")
                    assert len(body) == rows * 2 * dim
                    data[side, layer] = body
        return Entry(dim, shape, tuple(sorted(data.items())))


def _show(state: Any) -> str:
    if state is None:
        return "absent"
    if isinstance(state, Entry):
        rows = {f"{side.decode()}{layer}": len(blob) // (2 * state.dim) for (side, layer), blob in state.data}
        return f"Entry({rows}, hash {hash(state.data) & 0xFFFF:04x})"
    if isinstance(state, bytes):
        return f"{len(state)} bytes ({hash(state) & 0xFFFF:04x})"
    return repr(state)[:200]
