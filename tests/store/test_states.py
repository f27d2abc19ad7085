"""REGISTER … STATES: a prefix is whole only with the recurrent states that were declared, also after a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion import Engine
from pion.errors import CommandError, MismatchError
from pion.limits import FORMATS

FP16 = FORMATS["fp16"]
DIGEST = "ab" * 32


def _rows(engine: Engine, ns: bytes, layers: int = 1) -> None:
    for layer in range(layers):
        for side in (b"_pk", b"_pv"):
            engine.v_store(ns + side, layer, 0, 3, bytes(3 * 8), "F16")


def test_a_prefix_is_a_hit_with_its_last_state(tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        engine.register(b"mixed", 4, FP16, rows=3, layers=1, states=2, digest=DIGEST)
        _rows(engine, b"mixed")
        assert engine.why(b"mixed").startswith("incomplete: state 0 of the declared 2 is missing")
        engine.ssm_store(b"mixed", 1, b"one")
        assert not engine.lookup(b"mixed", digest=DIGEST)
        engine.ssm_store(b"mixed", 0, b"zero")
        assert engine.lookup(b"mixed", digest=DIGEST)
        assert engine.why(b"mixed").startswith("hit: 1 layers of 3 rows and 2 states")
    with Engine(tmp_path / "data") as engine:
        assert engine.lookup(b"mixed", digest=DIGEST)
        engine.ssm_drop(b"mixed", 1)
        assert not engine.lookup(b"mixed", digest=DIGEST)
    with Engine(tmp_path / "data") as engine:
        assert not engine.lookup(b"mixed", digest=DIGEST)


def test_a_prefix_of_nothing_but_states(tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        engine.register(b"recurrent", 1, FP16, rows=7, layers=0, states=1)
        assert not engine.lookup(b"recurrent")
        engine.ssm_store(b"recurrent", 0, b"state")
        assert engine.lookup(b"recurrent")
        assert engine.ledger.tokens_served == 7
        with pytest.raises(CommandError, match="layer 0 is not below the declared LAYERS 0"):
            engine.v_store(b"recurrent_pk", 0, 0, 1, bytes(2), "F16")
    with Engine(tmp_path / "data") as engine:
        assert engine.lookup(b"recurrent")


def test_another_number_of_states_is_another_prefix(tmp_path: Path) -> None:
    with Engine(tmp_path / "data") as engine:
        engine.register(b"ns", 4, FP16, rows=3, layers=0, states=2)
        engine.ssm_store(b"ns", 0, b"state")
        engine.register(b"ns", 4, FP16, rows=3, layers=0, states=2)
        with pytest.raises(MismatchError, match=r"number of states \(2, not 3\)"):
            engine.register(b"ns", 4, FP16, rows=3, layers=0, states=3)
        engine.ssm_store(b"loose", 0, b"of nobody knows what")
        with pytest.raises(MismatchError, match=r"number of states \(none, not 1\)"):
            engine.register(b"loose", 4, FP16, rows=3, layers=0, states=1)
        engine.register(b"ns", 4, FP16, rows=3, layers=0, states=3, replace=True)
        assert engine.ssm_fetch(b"ns", 0) is None
