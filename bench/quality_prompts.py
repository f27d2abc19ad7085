"""Twenty texts of several thousand characters: from what a Python installation contains, and from templates.

Nothing is downloaded and no foreign prose is kept here. The texts of the first group differ a little between Python
versions; those of the second are the same everywhere, since they take only `Random.random()`, whose sequence Python
promises for a seed.
"""

from __future__ import annotations

import errno
import html.entities
import importlib
import inspect
import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from random import Random
from typing import Any

LENGTH = 9000  # characters; cut to tokens by the harness


# ---- from the installation --------------------------------------------------------------------------------------


def _topics(*names: str) -> str:
    """Prose of the language reference that `help()` shows."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name].strip() for name in names)


def _source(name: str) -> str:
    return inspect.getsource(importlib.import_module(name))


def _docs(name: str) -> str:
    """A module's documentation strings, the way a reference page lists them."""
    module = importlib.import_module(name)
    found = [inspect.getdoc(module) or ""]
    for key, value in vars(module).items():
        text = inspect.getdoc(value) if callable(value) and not key.startswith("_") else None
        if text and len(text) > 80:
            found.append(f"{name}.{key}\n\n{text}")
    return "\n\n".join(found)


def _statuses() -> str:
    lines = [f"{s.value} {s.phrase}: {s.description or 'no description'}." for s in HTTPStatus]
    lines += [f"{number} {name}: {os.strerror(number)}." for number, name in sorted(errno.errorcode.items())]
    return "\n".join(lines)


def _characters() -> str:
    lines = [f"&{name};\tU+{point:04X}\t{unicodedata.name(chr(point), 'unnamed')}" for name, point in _entities()]
    return "Character entities\n" + "\n".join(lines)


def _entities() -> list[tuple[str, int]]:
    return sorted(html.entities.name2codepoint.items(), key=lambda item: item[1])


# ---- from templates ---------------------------------------------------------------------------------------------


class Dice:
    """Choices that are the same on every Python."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def of(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]


NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emre", "Freya", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Mira")
THINGS = ("a bicycle lamp", "garden gloves", "a kettle", "two chairs", "a road map", "blue paint", "a wool blanket")
PLACES = ("the harbour", "the old mill", "the north gate", "the market square", "the station", "the river path")
GOODS = ("apples", "flour", "olive oil", "rice", "candles", "paper", "copper wire", "bricks", "tea", "soap")


def _shop(dice: Dice) -> Iterator[str]:
    customer, clerk = dice.of(NAMES), dice.of(NAMES)
    yield f"A conversation in a shop. {customer} is the customer, {clerk} stands behind the counter."
    while True:
        thing, price, day = dice.of(THINGS), 3 + dice.below(60), 2 + dice.below(9)
        yield f"{customer}: Good morning. I am looking for {thing}. Do you have it here?"
        yield f"{clerk}: We do. It costs {price} crowns, or {price * 2 - 2} crowns for two."
        yield f"{customer}: {dice.of(('That is more than I thought.', 'That is fair.', 'Is there a cheaper one?'))}"
        yield f"{clerk}: If you can wait {day} days, a delivery comes from {dice.of(PLACES)} and it costs {price - 2}."
        yield f"{customer}: {dice.of(('Then I wait.', 'I need it today, so I take it.', 'Let me think about it.'))}"


def _support(dice: Dice) -> Iterator[str]:
    faults = ("shows no picture", "restarts every hour", "cannot find the network", "prints only half a page")
    asked = ("turned it off for a minute", "tried another cable", "looked at the small green light", "read the manual")
    yield "Transcript of the help desk. Names are shortened."
    while True:
        number, fault = 1000 + dice.below(9000), dice.of(faults)
        yield f"[ticket {number}] User: My device {fault} since {dice.of(('Monday', 'this morning', 'the update'))}."
        yield f"[ticket {number}] Agent: I am sorry to hear that. Have you {dice.of(asked)}?"
        yield f"[ticket {number}] User: Yes, I have {dice.of(asked)}, and it still {fault}."
        yield f"[ticket {number}] Agent: Then please send us the {dice.of(('log', 'serial number', 'photo'))} of it."


def _ledger(dice: Dice) -> Iterator[str]:
    yield "date,account,goods,quantity,unit price,amount,balance"
    balance = 100_000
    for day in range(1, 10_000):
        quantity, price = 1 + dice.below(90), 25 + dice.below(900)
        amount = quantity * price * dice.of((-1, -1, 1))
        balance += amount
        date = f"2024-{1 + day // 28 % 12:02}-{1 + day % 28:02}"
        row = (date, dice.of(NAMES), dice.of(GOODS), quantity, f"{price / 100:.2f}")
        yield ",".join(map(str, (*row, f"{amount / 100:.2f}", f"{balance / 100:.2f}")))


def _records(dice: Dice) -> Iterator[str]:
    for number in range(1, 10_000):
        record = {
            "id": number,
            "name": dice.of(NAMES),
            "address": {"place": dice.of(PLACES), "house": 1 + dice.below(120)},
            "orders": [{"item": dice.of(GOODS), "count": 1 + dice.below(9)} for _ in range(1 + dice.below(3))],
            "active": dice.below(2) == 1,
            "score": round(dice.random() * 100, 2),
        }
        yield json.dumps(record, indent=1 if number % 3 == 0 else None)


def _log(dice: Dice) -> Iterator[str]:
    clock = 36_000_000
    while True:
        clock += 1 + dice.below(4000)
        at = f"{clock // 3_600_000:02}:{clock // 60_000 % 60:02}:{clock // 1000 % 60:02}.{clock % 1000:03}"
        level = dice.of(("INFO", "INFO", "INFO", "WARN", "ERROR", "DEBUG"))
        what = dice.of(("opened", "closed", "read", "wrote", "timed out on", "retried"))
        where = f"/{dice.of(('data', 'tmp', 'logs', 'cache'))}/{dice.of(GOODS).replace(' ', '-')}.{dice.below(100)}"
        yield f"{at} {level:5} worker-{dice.below(8)} {what} {where}, {dice.below(900)} ms, {dice.below(65536)} bytes"


def _steps(dice: Dice) -> Iterator[str]:
    doing = ("Measure", "Cut", "Wash", "Warm", "Mix", "Weigh", "Wrap", "Label", "Check")
    why = ("so that nothing is lost", "because it dries quickly", "before the light fades", "as the list asks for it")
    yield "How to prepare the stall for the spring market, step by step."
    for number in range(1, 10_000):
        yield f"{number}. {dice.of(doing)} {2 + dice.below(40)} pieces of {dice.of(GOODS)}, {dice.of(why)}."
        if dice.below(3) == 0:
            yield f"   - {dice.of(NAMES)} helps with the {dice.of(GOODS)}; allow {5 + dice.below(55)} minutes."


def _sums(dice: Dice) -> Iterator[str]:
    yield "Exercises with their solutions."
    for number in range(1, 10_000):
        a, b, c = 2 + dice.below(98), 2 + dice.below(98), 2 + dice.below(18)
        who, goods = dice.of(NAMES), dice.of(GOODS)
        yield f"{number}. {who} buys {a} boxes of {goods} with {c} pieces each and gives {b} pieces away."
        yield f"   Solution: {a} x {c} = {a * c}, and {a * c} - {b} = {a * c - b}. {who} keeps {a * c - b} pieces."


def _story(dice: Dice) -> Iterator[str]:
    hero, friend = dice.of(NAMES), dice.of(NAMES)
    weather = ("The rain had stopped", "Fog lay over the water", "It was the first warm day", "The wind turned north")
    moods = ("and nobody spoke of the letter", "and for once they were early", "but the door stayed shut")
    seen = ("a boat without a name", "three lanterns in a row", "an open window", "the mark of a wheel in the sand")
    while True:
        yield (
            f"{dice.of(weather)} when {hero} came to {dice.of(PLACES)}, {dice.of(moods)}. There was {dice.of(seen)}, "
            f"and further on {dice.of(seen)}. {friend} had said that it would be like this, {dice.of(moods)}. So they "
            f"went on to {dice.of(PLACES)}, carrying {dice.of(THINGS)} and {dice.of(THINGS)}, until {dice.of(NAMES)} "
            f'called them back. "{dice.of(("Wait", "Listen", "Come and see", "Not today"))}," said {hero}.'
        )


def _minutes(dice: Dice) -> Iterator[str]:
    yield "Minutes of the meetings of the committee for public gardens."
    for number in range(1, 10_000):
        yield f"\nMeeting {number}. Present: {', '.join(sorted({dice.of(NAMES) for _ in range(5)}))}."
        for item in "abc":
            votes = 1 + dice.below(5)
            yield f"({item}) {dice.of(NAMES)} proposes to spend {10 * (1 + dice.below(90))} crowns on {dice.of(THINGS)}"
            yield f"    for {dice.of(PLACES)}. {votes} in favour, {5 - votes} against: "
            yield f"    {'accepted' if votes > 2 else 'rejected'}. {dice.of(NAMES)} writes to the council."


def _cut(lines: Iterator[str]) -> str:
    text: list[str] = []
    while sum(map(len, text)) < LENGTH:
        text.append(next(lines))
    return "\n".join(text)


SOURCES: dict[str, Callable[[], str]] = {
    "reference: statements": lambda: _topics("compound"),
    "reference: strings": lambda: _topics("formatstrings"),
    "reference: classes": lambda: _topics("specialnames"),
    "reference: imports": lambda: _topics("import", "execmodel"),
    "documentation: statistics": lambda: _docs("statistics"),
    "documentation: containers": lambda: _docs("collections") + _docs("itertools") + _docs("functools"),
    "code: heapq": lambda: _source("heapq"),
    "code: textwrap": lambda: _source("textwrap"),
    "code: json.decoder": lambda: _source("json.decoder"),
    "list: statuses and errors": _statuses,
    "list: characters": _characters,
    "dialogue: shop": lambda: _cut(_shop(Dice(1))),
    "dialogue: help desk": lambda: _cut(_support(Dice(2))),
    "numbers: ledger": lambda: _cut(_ledger(Dice(3))),
    "data: JSON": lambda: _cut(_records(Dice(4))),
    "data: log": lambda: _cut(_log(Dice(5))),
    "list: steps": lambda: _cut(_steps(Dice(6))),
    "numbers: exercises": lambda: _cut(_sums(Dice(7))),
    "prose: story": lambda: _cut(_story(Dice(8))),
    "prose: minutes": lambda: _cut(_minutes(Dice(9))),
}


def texts() -> dict[str, str]:
    """The texts by name, at most `LENGTH` characters each, kinds mixed so that the first few are varied too."""
    order = sorted(SOURCES, key=lambda name: list(SOURCES).index(name) * 7 % len(SOURCES))
    return {name: SOURCES[name]()[:LENGTH] for name in order}
