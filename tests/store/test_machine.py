"""Random histories of the engine against the model, with orderly restarts, kills, torn tails and compactions.

A kill is a copy of the data directory taken while the engine runs: the bytes the page cache would have kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pion.errors import CommandError, MismatchError
from pion.limits import FORMATS
from pion.store.engine import Engine

from . import model
from .model import BF16, F16, F32
from .support import crash, stored

NAMES = [b"a", b"bb", b"with space \xff"]
RAW_NAMES = [b"raw", b"_pk", b"x_pkx"]
FMT_WORD = {F32: "F32", F16: "F16", BF16: "BF16"}

names = st.sampled_from(NAMES)
layers = st.integers(0, 2)
starts = st.integers(0, 9)
counts = st.integers(1, 6)
formats = st.sampled_from([F32, F16, BF16])
seeds = st.integers(0, 1 << 30)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="pion-machine-"))
        self.number = 0
        self.entries: dict[bytes, model.Entry] = {}
        self.raw: dict[bytes, model.Side] = {}
        self.snapshots: dict[bytes, list[tuple[int, dict[int, int]]]] = {}

    @property
    def path(self) -> Path:
        return self.base / str(self.number)

    @initialize()
    def start(self) -> None:
        self.open()

    def open(self) -> None:
        self.engine = Engine(self.path, max_bytes=1 << 30, ticker=False)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
        shutil.rmtree(self.base)

    def session(self, sid: bytes) -> model.Side | None:
        if sid in self.raw:
            return self.raw[sid]
        entry = self.entries.get(sid[:-3])
        return entry.sides[0 if sid.endswith(b"_pk") else 1] if entry and sid[-3:] in (b"_pk", b"_pv") else None

    # --- registering ------------------------------------------------------------------------------------------------

    @rule(ns=names, dim=st.sampled_from([4, 6]), fmt=formats, shape=st.sampled_from([None, (5, 2)]),
          digest=st.sampled_from([None, "aa", "bb"]), blocks=st.booleans(), replace=st.booleans())  # fmt: skip
    def register(self, ns: bytes, dim: int, fmt: int, shape: Any, digest: Any, blocks: bool, replace: bool) -> None:
        table = (16, os.urandom(24)) if blocks else None
        options = {"rows": shape[0], "layers": shape[1]} if shape else {}
        old = self.entries.get(ns)
        clash = old is not None and self.clash(old, dim, fmt, shape, digest)
        call = lambda: self.engine.register(ns, dim, fmt, blocks=table, digest=digest, replace=replace, **options)  # noqa: E731
        if clash and not replace:
            with pytest.raises(MismatchError, match=r"^MISMATCH "):
                call()
            return
        call()
        unsaid = replace and old is not None and old.digest is not None and digest is None
        if old is None or clash or unsaid:
            self.entries[ns] = old = model.Entry()
            self.snapshots = {sid: kept for sid, kept in self.snapshots.items() if sid[:-3] != ns}
        old.sides = [side or model.Side(dim, fmt) for side in old.sides]
        old.shape, old.digest = shape or old.shape, digest or old.digest
        old.blocks = table or old.blocks

    def clash(self, old: model.Entry, dim: int, fmt: int, shape: Any, digest: Any) -> bool:
        if any(side is not None and (side.dim, side.fmt) != (dim, fmt) for side in old.sides):
            return True
        held = any(layer.tokens for side in old.sides if side for layer in side.layers.values())
        return any(
            asked is not None and asked != has and (has is not None or held)
            for asked, has in ((shape, old.shape), (digest, old.digest))
        )

    @rule(sid=st.sampled_from([*RAW_NAMES, *(ns + side for ns in NAMES for side in (b"_pk", b"_pv"))]), fmt=formats)
    def create(self, sid: bytes, fmt: int) -> None:
        index = self.engine.v_create(sid, 4, fmt)
        assert index >= 0
        if sid in RAW_NAMES:
            self.raw.setdefault(sid, model.Side(4, fmt))
            return
        entry = self.entries.setdefault(sid[:-3], model.Entry())
        side = 0 if sid.endswith(b"_pk") else 1
        entry.sides[side] = entry.sides[side] or model.Side(4, fmt)

    def sids(self) -> list[bytes]:
        out = list(self.raw)
        for ns, entry in self.entries.items():
            out += [ns + tail for tail, side in zip((b"_pk", b"_pv"), entry.sides, strict=True) if side]
        return sorted(out)

    # --- storing ----------------------------------------------------------------------------------------------------

    @rule(data=st.data(), layer=layers, start=starts, count=counts, seed=seeds,
          way=st.sampled_from(["once", "sink", "abort", "half"]))  # fmt: skip
    @precondition(lambda self: self.sids())
    def store(self, data: st.DataObject, layer: int, start: int, count: int, seed: int, way: str) -> None:
        sid = data.draw(st.sampled_from(self.sids()))
        side = self.session(sid)
        assert side is not None
        blob = model.words(seed, count, side.dim, side.fmt)
        shape = self.entries[sid[:-3]].shape if sid not in self.raw else None
        if shape and (start + count > shape[0] or layer >= shape[1]):
            with pytest.raises(CommandError, match="declared"):
                self.engine.v_store(sid, layer, start, count, blob, FMT_WORD[side.fmt])
            return
        if way == "once":
            self.engine.v_store(sid, layer, start, count, blob, FMT_WORD[side.fmt])
        else:
            sink = self.engine.v_store_open(sid, layer, start, count, len(blob))
            sink.feed(blob if way == "sink" else blob[: len(blob) // 2])
            if way != "sink":
                if way == "abort":
                    self.engine.v_store_abort(sink)
                else:
                    with pytest.raises(CommandError):
                        self.engine.v_store_finish(sink, FMT_WORD[side.fmt])
                return
            self.engine.v_store_finish(sink, FMT_WORD[side.fmt])
        side.store(layer, start, blob)

    @rule(data=st.data(), layer=layers, start=starts, count=counts)
    @precondition(lambda self: self.sids())
    def store_while_another_streams(self, data: st.DataObject, layer: int, start: int, count: int) -> None:
        sid = data.draw(st.sampled_from(self.sids()))
        side = self.session(sid)
        assert side is not None
        if sid not in self.raw and self.entries[sid[:-3]].shape:
            return
        first, second = (model.words(seed, count, side.dim, side.fmt) for seed in (1, 2))
        sink = self.engine.v_store_open(sid, layer, start, count, len(first))
        sink.feed(first[:4])
        self.engine.v_store(sid, layer, start + 20, count, second, FMT_WORD[side.fmt])
        side.store(layer, start + 20, second)
        if data.draw(st.booleans()):
            sink.feed(first[4:])
            self.engine.v_store_finish(sink, FMT_WORD[side.fmt])
            side.store(layer, start, first)
        else:
            self.engine.v_store_abort(sink)

    @rule(ns=names, layer=st.integers(0, 3), size=st.integers(0, 200))
    def store_state(self, ns: bytes, layer: int, size: int) -> None:
        blob = os.urandom(size)
        self.engine.ssm_store(ns, layer, blob)
        self.entries.setdefault(ns, model.Entry()).states[layer] = blob

    @rule(ns=names, layer=st.sampled_from([None, 0, 1]))
    def drop_state(self, ns: bytes, layer: int | None) -> None:
        self.engine.ssm_drop(ns, layer)
        entry = self.entries.get(ns)
        if entry is None:
            return
        had = bool(entry.states)
        entry.states = {n: blob for n, blob in entry.states.items() if layer is not None and n != layer}
        if had and not entry.states and entry.sides == [None, None]:
            del self.entries[ns]

    @rule(some=st.lists(names, min_size=1, max_size=2, unique=True))
    def drop(self, some: list[bytes]) -> None:
        assert self.engine.drop(*some) == sum(ns in self.entries for ns in some)
        for ns in some:
            self.entries.pop(ns, None)
            for tail in (b"_pk", b"_pv"):
                self.snapshots.pop(ns + tail, None)

    # --- rollback ---------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: self.sids())
    def snapshot(self, data: st.DataObject) -> None:
        sid = data.draw(st.sampled_from(self.sids()))
        kept = self.snapshots.setdefault(sid, [])
        if len(kept) >= 16:
            return
        side = self.session(sid)
        assert side is not None
        lengths = {n: layer.tokens for n, layer in side.layers.items()}
        kept.append((self.engine.v_snapshot(sid), lengths))

    @rule(data=st.data())
    @precondition(lambda self: any(self.snapshots.values()))
    def restore(self, data: st.DataObject) -> None:
        sid = data.draw(st.sampled_from(sorted(sid for sid, kept in self.snapshots.items() if kept)))
        ident, lengths = data.draw(st.sampled_from(self.snapshots[sid]))
        self.engine.v_restore(sid, ident)
        side = self.session(sid)
        assert side is not None
        for n in side.layers:
            side.trim(n, lengths.get(n, 0))

    # --- restarts ---------------------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.snapshots = {}
        self.open()
        assert self.engine.info()["wal_replayed"] == 0

    @rule(tail=st.sampled_from([b"", b"\0" * 4096, b"garbage " * 75, b"\x01" * 63]), pick=seeds, index=st.booleans())
    def kill(self, tail: bytes, pick: int, index: bool) -> None:
        old = self.path
        self.number += 1
        crash(old, self.path)
        self.engine.close()
        shutil.rmtree(old)
        files = sorted(self.path.glob("kv/_/*/*.pion"))
        if files and tail:
            with files[pick % len(files)].open("ab") as file:
                file.write(tail)
        if index:
            (self.path / "pion.index").unlink()
        self.snapshots = {}
        self.open()
        assert self.engine.info()["vstore_quarantined"] == 0

    @rule(ns=names)
    def compact(self, ns: bytes) -> None:
        self.engine.compact(ns)

    @rule()
    def upkeep(self) -> None:
        for _ in range(3):
            self.engine._upkeep._upkeep()

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def sizes_are_true(self) -> None:
        if not hasattr(self, "engine"):
            return
        info = self.engine.info()
        sides = [side for entry in self.entries.values() for side in entry.sides if side]
        keys = [entry.sides[0] for entry in self.entries.values() if entry.sides[0]]
        everything = [*sides, *self.raw.values()]
        assert info["registered_prefixes"] == len(keys)
        assert info["vstore_sessions"] == len(everything)
        assert info["total_prefix_tokens"] == sum(n.tokens for side in keys for n in side.layers.values())
        assert info["vstore_bytes"] == sum(
            n.tokens * side.dim * model.STRIDE[side.fmt] for side in everything for n in side.layers.values()
        )

    @invariant()
    def rows_are_there(self) -> None:
        if not hasattr(self, "engine"):
            return
        for sid in self.sids():
            side = self.session(sid)
            assert side is not None
            entry = self.entries.get(sid[:-3]) if sid not in self.raw else None
            about = self.engine.v_info(sid)
            assert (about.dim, about.fmt, about.num_layers) == (side.dim, side.fmt, side.num_layers)
            assert about.rows == [side.layers.get(n, model.Layer()).tokens for n in range(side.num_layers)]
            for layer in range(side.num_layers + 1):
                if entry and entry.shape:
                    self.check_declared(sid, side, layer, entry.shape)
                    continue
                end = side.layers[layer].tokens + 2 if layer in side.layers else 3
                assert stored(self.engine, sid, layer, 0, end) == side.fetch(layer, 0, end)
                wide = self.engine.v_fetch_range(sid, layer, 1, end)
                want = model.widen(side.fetch(layer, 1, end), side.fmt)
                assert (wide.tobytes() if wide is not None else None) == want

    def check_declared(self, sid: bytes, side: model.Side, layer: int, shape: tuple[int, int]) -> None:
        held = side.layers.get(layer, model.Layer()).rows
        if layer < shape[1] and set(held) == set(range(shape[0])):
            assert stored(self.engine, sid, layer, 0, shape[0]) == side.fetch(layer, 0, shape[0])
            with pytest.raises(CommandError, match="declared"):
                self.engine.v_fetch_range(sid, layer, 0, shape[0] + 1)
        elif held:
            with pytest.raises(CommandError, match="declared"):
                self.engine.v_fetch_range(sid, layer, 0, shape[0])
        else:
            assert self.engine.v_fetch_range(sid, layer, 0, shape[0]) is None

    @invariant()
    def lookups_tell(self) -> None:
        if not hasattr(self, "engine"):
            return
        for ns in NAMES:
            entry = self.entries.get(ns)
            assert self.engine.lookup(ns) == (entry is not None and entry.is_hit)
            why = self.engine.why(ns)
            assert why.startswith("hit:") == (entry is not None and entry.is_hit), why
            table = entry.blocks if entry else None
            want = table[0].to_bytes(4, "little") + (3).to_bytes(4, "little") + table[1] if table else None
            assert self.engine.blocks(ns) == want
            if table:
                assert self.engine.membership(ns, table[1] + bytes(8)) in (b"\x07", b"\x0f")
            for layer in range(4):
                got = self.engine.ssm_fetch(ns, layer)
                assert (got.tobytes() if got is not None else None) == (entry.states.get(layer) if entry else None)


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestMachine = pytest.mark.timeout(600)(Machine.TestCase)

assert FORMATS["fp32"] == F32
