"""Random histories of a store, and what may be left of them: the model the faults are compared with.

A prefix is a *generation*: a format and, for every row, the values it may have. A step that was acknowledged happened;
one that answered an error, or was running when the process ended, may have happened. `now` is what a start may find
after a stop, `since` what it may find after a power cut: everything that was possible since the last COMMIT or SAVE.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.replies import command

DIM, ROWS = 48, 12
FORMATS = {"fp16": 2, "bf16": 9, "fp32": 8}
ABSENT = ""
NAMESPACES = [b"a", b"b"]


@dataclass
class Generation:
    """One life of a prefix. rows: place -> possible values (hex of FP32), ABSENT among them."""

    number: int
    fmt: int
    rows: dict[str, set[str]] = field(default_factory=dict)

    def copy(self) -> Generation:
        return Generation(self.number, self.fmt, {place: set(values) for place, values in self.rows.items()})

    def merge(self, other: Generation) -> None:
        for place in set(self.rows) | set(other.rows):
            self.rows[place] = self.rows.get(place, {ABSENT}) | other.rows.get(place, {ABSENT})


Worlds = dict[int, Generation | None]  # by number; 0 = not there


def _join(into: Worlds, more: Worlds) -> None:
    for number, gen in more.items():
        here = into.get(number)
        if here is not None and gen is not None:
            here.merge(gen)
        else:
            into[number] = gen.copy() if gen else None


@dataclass
class Thing:
    """A prefix or a key: possible worlds now, and since the last commit."""

    now: Any
    since: Any


class Model:
    """Fed with steps and how each ended; `problems` compares it with what a start found."""

    def __init__(self) -> None:
        self.prefixes = {ns.decode(): Thing({0: None}, {0: None}) for ns in NAMESPACES}
        self.keys: dict[str, Thing] = {}

    def took(self, step: Step, acked: bool) -> None:
        """A step ended (acked), or may have happened."""
        step.effect(self, acked)
        for thing in self.prefixes.values():
            _join(thing.since, thing.now)
        for thing in self.keys.values():
            thing.since |= thing.now

    def key(self, name: str) -> Thing:
        return self.keys.setdefault(name, Thing({None}, {None}))

    def commit(self) -> None:
        for thing in self.prefixes.values():
            thing.since = {number: gen.copy() if gen else None for number, gen in thing.now.items()}
        for thing in self.keys.values():
            thing.since = set(thing.now)

    def problems(self, found: dict[str, Any], *, power_cut: bool) -> list[str]:
        """What a start found and should not have."""
        out = []
        for name, thing in self.prefixes.items():
            worlds: Worlds = thing.since if power_cut else thing.now
            reasons = [_differs(found["prefixes"][name], gen) for gen in worlds.values()]
            if all(reasons):
                out.append(f"prefix {name}: {' / '.join(map(str, reasons))}")
        for name, thing in self.keys.items():
            got = found["keys"].get(name)
            value = tuple(got) if got else None
            if value not in (thing.since if power_cut else thing.now):
                out.append(f"key {name} is {value}, not one of {thing.since if power_cut else thing.now}")
        out += [f"key {name} was never set" for name in found["keys"] if name not in self.keys]
        return out


def _differs(got: dict[str, Any] | None, gen: Generation | None) -> str:
    """Why this is not the generation; empty when it may be."""
    if got is None or gen is None:
        return "" if got is gen else f"is {'there' if got else 'gone'}"
    if got["fmt"] != gen.fmt:
        return f"has format {got['fmt']}, not {gen.fmt}"
    for place in set(got["rows"]) | set(gen.rows):
        value = got["rows"].get(place, ABSENT)
        if value not in gen.rows.get(place, {ABSENT}):
            return f"row {place} of generation {gen.number} is {value[:16] or 'absent'}"
    full = {f"{side}.0.{row}" for side in (0, 1) for row in range(ROWS)}
    if got["hit"] != (set(got["rows"]) == full):
        return f"is a {'hit' if got['hit'] else 'miss'} with {len(got['rows'])} rows"
    return ""


@dataclass
class Step:
    """One command: its frame, and what it does to the model."""

    text: str
    frame: bytes
    effect: Callable[[Model, bool], None]


def _rows(rng: random.Random, count: int, dim: int) -> tuple[bytes, list[str]]:
    """Rows as they are sent (FP32) and as they come back, hex by row; values every format keeps."""
    values = np.frombuffer(rng.randbytes(count * dim), np.uint8).astype(np.float32).reshape(count, dim) + 1
    return values.tobytes(), [row.tobytes().hex() for row in values]


def _register(name: str, number: int, fmt: str, dim: int = DIM) -> Step:
    def effect(model: Model, acked: bool) -> None:
        thing = model.prefixes[name]
        fresh = {number: Generation(number, FORMATS[fmt])}
        thing.now = fresh if acked else {**thing.now, **fresh}

    frame = command(
        "KV.PREFIX.REGISTER", name, dim, fmt, "ROWS", ROWS, "LAYERS", 1, "DIGEST", f"{number:04x}", "REPLACE"
    )
    return Step(f"REGISTER {name} {fmt}", frame, effect)


def _store(name: str, side: int, start: int, count: int, blob: bytes, values: list[str]) -> Step:
    def effect(model: Model, acked: bool) -> None:
        thing = model.prefixes[name]
        if acked:  # so it was there
            thing.now = {number: gen for number, gen in thing.now.items() if gen is not None}
        for gen in thing.now.values():
            if gen is None:
                continue
            for i in range(count):
                place = f"{side}.0.{start + i}"
                gen.rows[place] = {values[i]} if acked else gen.rows.get(place, {ABSENT}) | {values[i]}

    sid = f"{name}_p{'kv'[side]}"
    return Step(f"STOREBATCH {sid} {start}+{count}", command("V.STOREBATCH", sid, 0, start, count, blob), effect)


def _drop(name: str) -> Step:
    def effect(model: Model, acked: bool) -> None:
        thing = model.prefixes[name]
        thing.now = {0: None} if acked else {**thing.now, 0: None}

    return Step(f"DROP {name}", command("KV.PREFIX.DROP", name), effect)


def _whole(word: str) -> Step:
    def effect(model: Model, acked: bool) -> None:
        if acked:
            model.commit()

    return Step(word, command(f"KV.PREFIX.{word}"), effect)


def _key(text: str, name: str, change: Callable[[Any], Any]) -> Step:
    def effect(model: Model, acked: bool) -> None:
        thing = model.key(name)
        fresh = {change(value) for value in thing.now}
        thing.now = fresh if acked else thing.now | fresh

    return Step(text, command(*text.split(" ")), effect)


def _flushall() -> Step:
    def effect(model: Model, acked: bool) -> None:
        for thing in model.keys.values():
            thing.now = {None} if acked else thing.now | {None}

    return Step("FLUSHALL", command("FLUSHALL"), effect)


def _set(rng: random.Random, name: str) -> Step:
    value = "".join(rng.choice("abcdef") for _ in range(rng.choice([1, 20, 700])))
    return _key(f"SET {name} {value}", name, lambda _: (value.encode().hex(), False))


def _simple(rng: random.Random) -> Step:
    name = rng.choice(["k1", "k2", "k3"])
    kind = rng.choice(["set", "set", "del", "expire", "flushall"])
    if kind == "set":
        return _set(rng, name)
    if kind == "del":
        return _key(f"DEL {name}", name, lambda _: None)
    if kind == "expire":
        return _key(f"EXPIRE {name} 100000", name, lambda value: (value[0], True) if value else None)
    return _flushall()


def twelve() -> list[Step]:
    """The fixed history: everything a store does, once."""
    rng = random.Random(0)
    store = [_rows(rng, ROWS, DIM), _rows(rng, ROWS, DIM), _rows(rng, 5, DIM)]
    return [
        _register("a", 1, "fp16"),
        _store("a", 0, 0, ROWS, *store[0]),
        _store("a", 1, 0, ROWS, *store[1]),
        _set(rng, "k1"),
        _whole("COMMIT"),
        _drop("a"),
        _register("a", 2, "bf16"),
        _store("a", 0, 3, 5, *store[2]),
        _key("EXPIRE k1 100000", "k1", lambda value: (value[0], True) if value else None),
        _whole("SAVE"),
        _key("DEL k1", "k1", lambda _: None),
        _flushall(),
    ]


def random_history(seed: int, length: int = 12, dim: int = DIM) -> list[Step]:
    """Steps that all make sense one after the other; prefixes with `dim` values in a row."""
    rng = random.Random(seed)
    steps: list[Step] = []
    number = 0
    known: dict[str, str] = {}
    while len(steps) < length:
        name = rng.choice(["a", "b"])
        kind = rng.choice(["register", "store", "store", "store", "drop", "key", "key", "COMMIT", "SAVE"])
        if kind == "register" or (kind == "store" and name not in known):
            number += 1
            known[name] = rng.choice([fmt for fmt in FORMATS if fmt != known.get(name)])
            steps.append(_register(name, number, known[name], dim))
        elif kind == "store":
            count = rng.choice([1, 3, ROWS])
            start = rng.randint(0, ROWS - count)
            steps.append(_store(name, rng.randint(0, 1), start, count, *_rows(rng, count, dim)))
        elif kind == "drop" and name in known:
            del known[name]
            steps.append(_drop(name))
        elif kind == "key":
            steps.append(_simple(rng))
        elif kind == "COMMIT" or (kind == "SAVE" and known):  # without a session SAVE answers an error
            steps.append(_whole(kind))
    return steps
