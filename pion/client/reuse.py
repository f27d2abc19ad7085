"""Which stored prefix is of use for tokens that are not stored themselves.

The server answers which entries begin with the same blocks; that is a hint. What counts is what an entry says of
itself, proved by its digest: it belongs to the same model and kind of cache, and its tokens, compared one by one, begin
alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pion.client import slots
from pion.client.caches import Layout
from pion.client.connection import Flight, Steps
from pion.client.errors import IncompleteError
from pion.client.manifest import shared
from pion.client.transfer import Entry, match_command, names_of, read

__all__ = ["Candidate", "Ids", "compare", "find", "near", "worth"]

_LEAST: Final = 16  # tokens for which it is worth asking the server again

Ids = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class Candidate:
    """An entry beside what is asked for.

    Attributes:
        entry: with its tokens.
        shared: leading tokens that are the same.
        usable: how many of them can be used.
        reason: a sentence.
    """

    entry: Entry
    shared: int
    usable: int
    reason: str

    @property
    def stored(self) -> int:
        """Tokens of the entry."""
        return 0 if self.entry.ids is None else len(self.entry.ids)

    def differing(self, ids: Ids) -> tuple[int, int] | None:
        """(stored, asked) token at the first difference; None where one of the two ends first."""
        held = self.entry.ids
        if held is None or self.shared >= min(len(held), len(ids)):
            return None
        return int(held[self.shared]), int(ids[self.shared])


def compare(entry: Entry, identity: str, layout: Layout, ids: Ids) -> Candidate:
    """What of an entry is of use for `ids`."""
    manifest = entry.manifest
    assert manifest is not None
    assert entry.ids is not None
    common = shared(entry.ids, ids)
    if manifest.identity != identity or manifest.trees != layout.trees:
        return Candidate(entry, common, 0, "another model, or the same with other weights, computed what is stored")
    usable = manifest.usable(common)
    stored, asked = len(entry.ids), len(ids)
    if common == asked == stored:
        what = f"the same {stored} tokens"
    elif common == asked:
        what = f"{asked} tokens are asked for, the first of {stored} that are stored"
    elif common == stored:
        what = f"{asked} tokens are asked for, {stored} are stored, of which the first {common} agree"
    else:
        what = (
            f"token {common} is {int(ids[common])} and not {int(entry.ids[common])}, which is stored: "
            f"the first {common} of {asked} agree"
        )
    if usable < common:
        kinds = sorted({leaf["class"] for leaf in _flat(manifest.trees)} - {"KVCache", "QuantizedKVCache"})
        valid = ", ".join(map(str, manifest.boundaries[-8:]))
        where = f"the state in {' and '.join(kinds)} is valid at {valid} tokens only"
        what += f"; {usable} can be used: {where} (see checkpoints=)"
    return Candidate(entry, common, usable, what)


def worth(candidate: Candidate, ids: Ids) -> bool:
    """Whether enough of it can be used."""
    return candidate.usable >= min(_LEAST, len(ids))


def _flat(trees: Iterable[slots.Tree]) -> Iterable[slots.Tree]:
    for tree in trees:
        if "children" in tree:
            yield from _flat(tree["children"])
        else:
            yield tree


def near(scope_and_hashes: tuple[str, bytes]) -> Steps[list[str]]:
    """The namespaces of prefixes that begin with the same blocks, those that share most first."""
    if not scope_and_hashes[1]:
        return []
    (reply,) = yield Flight([match_command(scope_and_hashes)])
    return names_of(reply)


def find(names: Iterable[str], identity: str, layout: Layout, ids: Ids) -> Steps[list[Candidate]]:
    """The entries of these names beside `ids`, the most useful first."""
    found = []
    for name in names:
        try:
            entry = yield from read(name)
        except IncompleteError:  # it contradicts itself: of no use, whatever it is
            continue
        if entry is not None:
            candidate = compare(entry, identity, layout, ids)
            found.append(candidate)
            if candidate.usable == len(ids):
                break
    return sorted(found, key=lambda candidate: (-candidate.usable, -candidate.shared))
