"""What a stored prefix consists of: said in the entry itself, as its first two states.

=====  ====================================================================================================
state  what it holds
=====  ====================================================================================================
0      the manifest: JSON, see `Manifest`
1      the token ids, u32 little endian, all of them
2...   states of leaves that are no rows (`slots.State.pack`), told which leaf and how many tokens they are of
=====  ====================================================================================================

With the tokens at hand, whoever asks for other tokens can be told where the first difference is, and be given what is
the same. How much that can be depends on the leaves: rows, and states that hold every token, are cut anywhere; a
recurrent state, or a window that has dropped something, is valid at the *boundaries* where it was taken down and
nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pion.client.identity import prefix_digest

__all__ = ["FIRST", "Leaf", "Manifest", "held_tokens", "shared"]

FIRST: Final = 2  # the number of the first state that is a leaf's
_VERSION: Final = 1
_MOST: Final = 1 << 16  # states of an entry, as the server numbers them


@dataclass(frozen=True)
class Leaf:
    """Where a leaf of the cache is.

    Attributes:
        rows: its layer number among the rows; None: it is in states.
        states: the numbers of its states: one for each boundary, or the one of the last boundary when it can be cut.
        cut: it holds every token, so that it can be cut anywhere.
    """

    rows: int | None
    states: tuple[int, ...] = ()
    cut: bool = True


@dataclass(frozen=True)
class Manifest:
    """What is in an entry.

    Attributes:
        tokens: of the prefix.
        identity: of what it belongs to, hexadecimal, see `identity.cache_identity`.
        trees: the structure of the cache, see `slots.structure`.
        boundaries: numbers of tokens at which it can be used, ascending; the last one is `tokens`. If all leaves can be
            cut there is no other, and it can be used at any.
        leaves: in the order of `slots.leaves`.
    """

    tokens: int
    identity: str
    trees: list[dict[str, Any]]
    boundaries: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @property
    def cuttable(self) -> bool:
        """Whether any number of tokens can be used."""
        return all(leaf.cut for leaf in self.leaves)

    @property
    def row_layers(self) -> int:
        """Layers of rows."""
        return sum(leaf.rows is not None for leaf in self.leaves)

    @property
    def state_count(self) -> int:
        """States of the entry, these two included."""
        return FIRST + sum(len(leaf.states) for leaf in self.leaves)

    def usable(self, common: int) -> int:
        """How many tokens can be used of which the first `common` are the right ones."""
        common = min(common, self.tokens)
        if self.cuttable:
            return common
        return max((boundary for boundary in self.boundaries if boundary <= common), default=0)

    def states_at(self, count: int) -> dict[int, int]:
        """The states needed for the first `count` tokens, which are usable: number of the leaf → of the state."""
        return {
            number: leaf.states[-1 if leaf.cut else self.boundaries.index(count)]
            for number, leaf in enumerate(self.leaves)
            if leaf.rows is None
        }

    def pack(self) -> bytes:
        """The bytes of state 0."""
        about = {
            "version": _VERSION,
            "tokens": self.tokens,
            "identity": self.identity,
            "boundaries": self.boundaries,
            "slots": self.trees,
            "leaves": [
                {"rows": leaf.rows} if leaf.rows is not None else {"states": leaf.states, "cut": leaf.cut}
                for leaf in self.leaves
            ],
        }
        return json.dumps(about, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: Any) -> Manifest:
        """From the bytes of state 0.

        Raises:
            ValueError: they are none of a manifest of this version, or one that contradicts itself.
        """
        try:
            about = json.loads(bytes(data))
            if type(about["version"]) is not int or about["version"] != _VERSION:
                raise ValueError(f"a manifest of version {str(about['version'])[:20]}, not {_VERSION}")
            leaves = tuple(_leaf(leaf) for leaf in about["leaves"])
            boundaries = tuple(about["boundaries"])
            found = cls(about["tokens"], about["identity"], about["slots"], boundaries, leaves)
            found._check()
        except (KeyError, TypeError, AttributeError, RecursionError, ArithmeticError, MemoryError) as error:
            raise ValueError(f"a manifest that is not understood: {error!r}") from error
        return found

    def _check(self) -> None:
        numbers = [*self.boundaries, *(state for leaf in self.leaves for state in leaf.states)]
        if not all(type(number) is int and number > 0 for number in [self.tokens, *numbers]):
            raise ValueError("a manifest with numbers that are none")
        rising = list(self.boundaries) == sorted(set(self.boundaries))
        if not rising or not self.boundaries or self.boundaries[-1] != self.tokens:
            raise ValueError("a manifest whose boundaries do not end with its tokens")
        ranks = [leaf.rows for leaf in self.leaves if leaf.rows is not None]
        if ranks != list(range(len(ranks))):
            raise ValueError("a manifest whose layers of rows are not counted through")
        states = sorted(state for leaf in self.leaves for state in leaf.states)
        if states != list(range(FIRST, FIRST + len(states))) or self.state_count > _MOST:
            raise ValueError("a manifest whose states are not counted through")
        for leaf in self.leaves:
            if leaf.rows is None and len(leaf.states) != (1 if leaf.cut else len(self.boundaries)):
                raise ValueError("a manifest in which a leaf has not one state for each boundary")
        if not isinstance(self.identity, str) or not isinstance(self.trees, list):
            raise ValueError("a manifest that does not say whose it is")


def _leaf(about: dict[str, Any]) -> Leaf:
    if "rows" in about:
        if type(about["rows"]) is not int:
            raise ValueError("a manifest with a layer of rows that is no number")
        return Leaf(about["rows"])
    return Leaf(None, tuple(about["states"]), about["cut"] is True)


def held_tokens(manifest: Manifest, data: Any, digest: str | None) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The token ids of an entry, proved to be those its rows and states were computed from.

    Args:
        manifest: of the entry.
        data: its state 1.
        digest: that the entry was registered with.

    Raises:
        ValueError: the digest is not that of these tokens and of the manifest's identity.
    """
    ids = np.frombuffer(data, "<u4") if len(data) % 4 == 0 else np.empty(0, "<u4")
    if len(ids) != manifest.tokens:
        raise ValueError(f"{len(data)} bytes are not the ids of {manifest.tokens} tokens")
    if prefix_digest(bytes.fromhex(manifest.identity), ids) != digest:
        raise ValueError("the digest of the prefix is not that of the tokens it says it holds")
    return ids


def shared(one: Sequence[int] | np.ndarray[Any, Any], other: Sequence[int] | np.ndarray[Any, Any]) -> int:
    """How many leading tokens are the same."""
    most = min(len(one), len(other))
    return int(np.argmin(np.append(np.asarray(one[:most]) == np.asarray(other[:most]), False)))
