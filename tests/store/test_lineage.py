"""Which prefix goes: random histories against a plain model of last use, lineage, pins, leases and times to live."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pion._core import plane as core
from pion.errors import CommandError
from pion.store.engine import Engine

from .model import F16
from .support import crash

HELD = 3  # prefixes
NAMES = [b"n%d" % i for i in range(6)]
names = st.sampled_from(NAMES)
NOW = 1_700_000_000_000


@dataclass
class Known:
    """One prefix of the model."""

    used: int
    parent: bytes | None = None
    pinned: bool = False
    expires: int = 0


class Machine(RuleBasedStateMachine):
    """The model evicts by looking at everything it knows; it shares no code and no data structure with the store."""

    @initialize()
    def start(self) -> None:
        self.clock = pytest.MonkeyPatch()
        self.base = Path(tempfile.mkdtemp(prefix="pion-lineage-"))
        self.number, self.uses, self.now = 0, 0, NOW
        self.model: dict[bytes, Known] = {}
        self.leases: dict[bytes, dict[str, int]] = {}
        self.evicted = 0
        self.open()

    def open(self) -> None:
        self.clock.setattr("pion.store.store.wall_ms", lambda: self.now)
        self.engine = Engine(self.base / str(self.number), max_sessions=2 * HELD, appendfsync="no", ticker=False)
        self.engine._store.order.leases.now = lambda: self.now / 1000
        self.leases, self.evicted = {}, 0

    def teardown(self) -> None:
        if hasattr(self, "clock"):
            self.clock.undo()
        if hasattr(self, "engine"):
            self.engine.close()
            shutil.rmtree(self.base)

    # --- the model ---------------------------------------------------------------------------------------------------

    def living(self) -> dict[bytes, Known]:
        for ns in [ns for ns, known in self.model.items() if 0 < known.expires <= self.now]:
            del self.model[ns]
        return self.model

    def lineage(self, ns: bytes | None) -> list[bytes]:
        out: list[bytes] = []
        while ns is not None and ns in self.model:
            out.append(ns)
            ns = self.model[ns].parent
        return out

    def use(self, ns: bytes) -> None:
        self.uses += 1
        for name in self.lineage(ns):
            self.model[name].used = self.uses

    def leased(self, ns: bytes) -> dict[str, int]:
        self.leases[ns] = {who: end for who, end in self.leases.get(ns, {}).items() if end > self.now}
        return self.leases[ns]

    def evict(self) -> bool:
        parents = {known.parent for known in self.model.values()}
        free = [
            ns for ns, known in self.model.items() if not known.pinned and ns not in parents and not self.leased(ns)
        ]
        if not free:
            return False
        del self.model[min(free, key=lambda ns: self.model[ns].used)]
        self.evicted += 1
        return True

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(ns=names, parent=st.none() | names)
    def register(self, ns: bytes, parent: bytes | None) -> None:
        self.living()
        loop, above = parent == ns, parent
        seen: set[bytes] = set()
        while above is not None and above not in seen and not loop:
            seen.add(above)
            above = self.model[above].parent if above in self.model else None
            loop = above == ns
        if loop:
            with pytest.raises(CommandError, match="PARENT"):
                self.engine.register(ns, 4, F16, parent=parent)
            return
        self.tick()
        if parent in self.model:
            self.use(parent)
        if ns not in self.model and len(self.model) == HELD and not self.evict():
            with pytest.raises(CommandError, match="no free"):
                self.engine.register(ns, 4, F16, parent=parent)
            return
        self.engine.register(ns, 4, F16, parent=parent, blocks=(16, b"hashes!!"))
        known = self.model.setdefault(ns, Known(0))
        known.parent = parent or known.parent
        self.use(ns)

    @rule(ns=names, read=st.lists(st.tuples(names, st.sampled_from(["lookup", "probe"])), max_size=3))
    def register_after_reads(self, ns: bytes, read: list[tuple[bytes, str]]) -> None:
        for other, how in read:
            self.read(other, how)
        self.register(ns, None)

    @rule(ns=names, how=st.sampled_from(["lookup", "fetch", "membership", "probe"]))
    def read(self, ns: bytes, how: str) -> None:
        here = ns in self.living()
        if how == "lookup":
            assert self.engine.lookup(ns) == here
        elif how == "fetch" and here:
            self.engine.v_fetch_range(ns + b"_pv", 0, 0, 1)
        elif how == "membership":
            assert (self.engine.membership(ns, b"hashes!!") is not None) == here
        elif how == "probe":
            here = self.probed(ns)
        if here:
            self.use(ns)

    def probed(self, ns: bytes) -> bool:
        """As the plane answers it, without Python; False when it leaves it to Python."""
        engine = self.engine
        fast = [(core.FAST_MEMBERSHIP, b"KV.PREFIX.MEMBERSHIP", 4, 0)]
        plane = core.Plane(engine.keyspace, lambda conn, argv: b"slow", fast_table=fast)
        engine.keyspace.set_clock(self.now)
        conn = plane.open_memory()
        conn.authenticated = True
        plane.feed(conn, b"*4\r\n$20\r\nKV.PREFIX.MEMBERSHIP\r\n$2\r\n%s\r\n$1\r\n1\r\n$8\r\nhashes!!\r\n" % ns)
        reply = plane.take_output(conn)
        plane.close()
        assert reply in (b"$1\r\n\x01\r\n", b"$4\r\nslow\r\n")
        assert ns in self.model or reply == b"$4\r\nslow\r\n", "a table outlived its prefix"
        return bool(reply == b"$1\r\n\x01\r\n")

    @rule(ns=names)
    def drop(self, ns: bytes) -> None:
        assert self.engine.drop(ns) == (ns in self.living())
        self.model.pop(ns, None)

    @rule(some=st.lists(names, min_size=1, max_size=2, unique=True), on=st.booleans())
    def pin(self, some: list[bytes], on: bool) -> None:
        here = [self.model[ns] for ns in some if ns in self.living()]
        if on:
            assert self.engine.pin(*some) == len(here)
        else:
            assert self.engine.unpin(*some) == sum(known.pinned for known in here)
        for known in here:
            known.pinned = on

    @rule(ns=names, ms=st.sampled_from([-5, 0, 100, 2000]), word=st.sampled_from(["", "NX", "XX", "GT", "LT"]))
    def expire(self, ns: bytes, ms: int, word: str) -> None:
        known, when = self.living().get(ns), self.now + ms
        old = known.expires if known else 0
        done = known is not None and {
            "": True, "NX": not old, "XX": old > 0, "GT": 0 < old < when, "LT": not old or when < old
        }[word]  # fmt: skip
        assert self.engine.expire(ns, when, *([word] if word else [])) == done
        if known and done:
            known.expires = when

    @rule(ns=names)
    def persist(self, ns: bytes) -> None:
        known = self.living().get(ns)
        assert self.engine.persist(ns) == bool(known and known.expires)
        if known:
            known.expires = 0

    @rule(ns=names, who=st.sampled_from(["a", "b"]), ms=st.sampled_from([0, 100, 5000]))
    def lease(self, ns: bytes, who: str, ms: int) -> None:
        held = self.leased(ns)
        claimed = ns not in self.living() and any(other != who for other in held)
        assert self.engine.lease(ns, ms, who) == (not claimed or not ms)
        if not ms:
            held.pop(who, None)
        elif not claimed:
            held[who] = self.now + ms

    @rule(ms=st.sampled_from([1, 99, 1500]))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule()
    def tick(self) -> None:
        self.engine._upkeep._upkeep()
        self.living()

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.open()

    @rule(index=st.booleans())
    def kill(self, index: bool) -> None:
        """Pins, ends and lineage are in the files; the order of last use is in the index alone."""
        self.tick()
        self.engine._upkeep.rewrite_index()  # as every now and then: probes of compiled code are then told too
        old = self.base / str(self.number)
        self.number += 1
        crash(old, self.base / str(self.number))
        self.engine.close()
        shutil.rmtree(old)
        if not index:
            (self.base / str(self.number) / "pion.index").unlink()
        self.open()
        if not index:
            for ns in sorted(self.living()):  # nobody knows: make an order
                assert self.engine.lookup(ns)
                self.use(ns)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def the_same_prefixes_are_held(self) -> None:
        if not hasattr(self, "engine"):
            return
        living = self.living()
        assert set(self.engine.list()[1]) == set(living)
        info = self.engine.info()
        assert info["vstore_evicted"] == self.evicted
        for ns in NAMES:
            about = self.engine.about(ns)
            known = living.get(ns)
            assert about["stored"] == str(int(known is not None))
            assert int(about["lease_ms"]) == max(self.leased(ns).values(), default=self.now) - self.now
            if known is not None:
                assert about["parent"] == (known.parent or b"").decode()
                assert about["pinned"] == str(int(known.pinned))
                assert int(about["pttl"]) == (known.expires - self.now if known.expires else -1)
                assert int(about["children"]) == sum(other.parent == ns for name, other in living.items() if name != ns)
                assert self.engine.owner(ns) == 0


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestMachine = pytest.mark.timeout(600)(Machine.TestCase)
