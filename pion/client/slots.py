"""mlx-lm's cache objects, taken apart into arrays and numbers and put together again, bit for bit.

A prompt cache is a list of *slots*, one for each layer that keeps something. A slot is a *leaf* (an object that holds
arrays) or a list of slots: ``CacheList``, a Python list or tuple. What a leaf consists of is written down here, class
by class, as attributes: `state` and `meta_state` of these classes changed with mlx-lm 0.32, the attributes did not.

A class that is not in the table is refused by name, subclasses of known ones included: their author changed something,
and it cannot be known what. Nothing is ever built from a name that was stored: restoring sets the attributes of objects
that the model made itself.

mlx and mlx-lm are imported inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pion.client.mlx_arrays import PionMlxCompatError, mlx_modules, words
from pion.client.payload import Tensor, pack, unpack

__all__ = [
    "State",
    "Tree",
    "all_cuttable",
    "cuttable",
    "give",
    "leaves",
    "length",
    "parse",
    "shapes",
    "structure",
    "take",
    "tree_kind",
    "whole",
]


@dataclass(frozen=True)
class _Kind:
    """A leaf class: names of its attributes.

    Attributes:
        arrays: (1, H, capacity, D) of which the token axis is the third; a triple of such when `triples`.
        progress: numbers that change while it is used.
        settings: numbers that it was made with.
        grows: its arrays end with room for more tokens.
    """

    arrays: tuple[str, ...]
    progress: tuple[str, ...]
    settings: tuple[str, ...] = ()
    triples: bool = False
    grows: bool = False


_SIDES: Final = ("keys", "values")
_KINDS: Final[dict[str, _Kind]] = {
    "KVCache": _Kind(_SIDES, ("offset",), grows=True),
    "QuantizedKVCache": _Kind(_SIDES, ("offset",), ("group_size", "bits"), triples=True, grows=True),
    "ConcatenateKVCache": _Kind(_SIDES, ("offset",)),
    "RotatingKVCache": _Kind(_SIDES, ("offset", "_idx"), ("keep", "max_size")),
    "ChunkedKVCache": _Kind(_SIDES, ("offset", "start_position"), ("chunk_size",)),
    "ArraysCache": _Kind((), ()),
}
_KEEPING: Final = ("KVCache", "QuantizedKVCache", "ConcatenateKVCache")  # every token, always
_ARRAYS: Final = "ArraysCache"
_OLD_ARRAYS: Final = "MambaCache"  # what mlx-lm up to 0.28 calls an ArraysCache of two
_PADDING: Final = ("left_padding", "lengths")  # attributes of an ArraysCache that versions lack
_CHUNK_STEP: Final = 256  # a ChunkedKVCache grows by so many tokens
_BATCHED: Final = ("BatchKVCache", "BatchRotatingKVCache")

Tree = dict[str, Any]
"""The structure of a slot: ``{"class": name, settings...}``, and ``"children"`` for a list of slots."""

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""The arrays of a leaf that are there: name → (dtype, shape)."""


def _named(slot: Any) -> str:
    """The class of a slot as it is stored: exactly one of those known.

    Raises:
        PionMlxCompatError: it is none of them.
    """
    _, module = mlx_modules()
    kind = type(slot)
    if slot is None or kind in (list, tuple):
        return "None" if slot is None else kind.__name__
    for name in (*_KINDS, "CacheList", _OLD_ARRAYS):
        if kind is getattr(module, name, None):
            return _ARRAYS if name == _OLD_ARRAYS else name
    said = kind.__name__ if kind.__module__ == module.__name__ else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__name__ in _BATCHED:
        raise PionMlxCompatError(f"{said} holds a batch of sequences; a prefix is one sequence")
    known = ", ".join(sorted({*_KINDS, "CacheList"}))
    raise PionMlxCompatError(f"the cache class {said} is not one that is known how to store ({known}), exactly")


def _children(slot: Any, name: str) -> Sequence[Any] | None:
    if name in ("list", "tuple"):
        return list(slot)
    return list(slot.caches) if name == "CacheList" else None


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The leaves of a prompt cache, depth first; slots that are None are none.

    Raises:
        PionMlxCompatError: a class that is not known.
    """
    for slot in cache:
        name = _named(slot)
        children = _children(slot, name)
        if children is not None:
            yield from leaves(children)
        elif name != "None":
            yield slot


def structure(cache: Sequence[Any]) -> list[Tree]:
    """What a prompt cache is made of: the classes of its slots and the numbers they were made with.

    Raises:
        PionMlxCompatError: a class that is not known, or one of another shape than is known.
    """
    trees: list[Tree] = []
    for slot in cache:
        name = _named(slot)
        children = _children(slot, name)
        if children is not None:
            trees.append({"class": name, "children": structure(children)})
        elif name == "None":
            trees.append({"class": name})
        elif name == _ARRAYS:
            trees.append({"class": name, "slots": len(slot.cache)})
        else:
            wanted = (*_KINDS[name].arrays, *_KINDS[name].progress, *_KINDS[name].settings)
            missing = [attribute for attribute in wanted if not hasattr(slot, attribute)]
            if missing:
                raise PionMlxCompatError(f"this mlx-lm's {name} has no {' and no '.join(missing)}")
            trees.append({"class": name, **{setting: getattr(slot, setting) for setting in _KINDS[name].settings}})
    return trees


def tree_kind(trees: Sequence[Tree]) -> str:
    """A text that says what a prompt cache is made of; empty when every slot is a plain KVCache."""
    plain = all(tree == {"class": "KVCache"} for tree in trees)
    return "" if plain else json.dumps(list(trees), sort_keys=True, separators=(",", ":"))


def all_cuttable(trees: Sequence[Tree]) -> bool:
    """Whether every leaf of a structure is of a class that keeps every token."""
    return all(
        all_cuttable(tree["children"]) if "children" in tree else tree["class"] in (*_KEEPING, "None") for tree in trees
    )


def length(leaf: Any) -> int | None:
    """The tokens a leaf has seen; None when it does not know: an ArraysCache."""
    return None if _named(leaf) == _ARRAYS else int(leaf.offset)


def cuttable(leaf: Any) -> bool:
    """Whether every leaf of this class holds all its tokens, always."""
    return _named(leaf) in _KEEPING


def whole(leaf: Any) -> bool:
    """Whether a leaf holds every token it has seen, from the first on and in order, so that it can be cut anywhere.

    A window that nothing has left yet is whole, and so is a chunk that is not full.
    """
    name = _named(leaf)
    if name == _ARRAYS:
        return False
    if leaf.keys is None:
        return False
    if name == "RotatingKVCache":
        return bool(leaf._idx == leaf.offset <= leaf.keys.shape[2])
    if name == "ChunkedKVCache":
        return bool(leaf.start_position == 0 and leaf.offset <= leaf.keys.shape[2])
    return True


# --- taken apart -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a leaf holds, apart from mlx.

    Attributes:
        name: its class.
        numbers: its attributes that are numbers.
        tensors: its arrays by attribute; ``keys.0`` and the like for the parts of one.
        absent: names of arrays that are None.
    """

    name: str
    numbers: dict[str, int]
    tensors: dict[str, Tensor]
    absent: tuple[str, ...]

    def pack(self, **told: int | str) -> bytearray:
        """The bytes of it, with what else is `told`."""
        about = {"class": self.name, "numbers": self.numbers, "absent": list(self.absent), **told}
        return pack(self.tensors, {"pion": json.dumps(about, separators=(",", ":"))})


def parse(data: Any, **told: int | str) -> State:
    """The inverse of `State.pack`.

    Raises:
        ValueError: the bytes are not those of a state, or not of the one that is `told`.
    """
    tensors, metadata = unpack(data)
    try:
        about = json.loads(metadata["pion"])
        numbers, absent = about["numbers"], about["absent"]
        if any(about[name] != value for name, value in told.items()):
            raise ValueError(f"a state of something else: {metadata['pion'][:200]}")
        if not all(type(number) is int for number in numbers.values()):
            raise ValueError("a state with numbers that are none")
        return State(about["class"], numbers, tensors, tuple(absent))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a state that is not described: {error!r}") from error


def _tensor(array: Any) -> Tensor:
    return Tensor(str(array.dtype).rpartition(".")[2], _words(array))


def _words(array: Any) -> np.ndarray[Any, Any]:
    found = words(array)
    return found.view(np.float16) if str(array.dtype).endswith(".float16") else found


def _arrays(leaf: Any, name: str) -> dict[str, Any]:
    """The arrays of a leaf by name, those that are None too."""
    if name == _ARRAYS:
        named = {str(number): array for number, array in enumerate(leaf.cache)}
        return named | {attribute: getattr(leaf, attribute, None) for attribute in _PADDING}
    kind = _KINDS[name]
    named = {}
    for side in kind.arrays:
        held = getattr(leaf, side)
        parts = {f"{side}.{i}": part for i, part in enumerate(held)} if kind.triples and held is not None else {}
        named |= parts or {side: held}
    return named


def shapes(leaf: Any) -> Shapes:
    """The dtypes and shapes of the arrays of a leaf; they need not be computed yet."""
    arrays = _arrays(leaf, _named(leaf))
    return {
        name: (str(array.dtype).rpartition(".")[2], tuple(array.shape))
        for name, array in arrays.items()
        if array is not None
    }


def take(leaf: Any, count: int | None = None) -> State:
    """What a leaf holds.

    Args:
        leaf: of a prompt cache that was evaluated, or will be.
        count: only the first tokens, of a leaf that is `whole`.

    Returns:
        Views into the leaf's memory: pack them before it is used again.
    """
    name = _named(leaf)
    named, numbers = _arrays(leaf, name), {}
    if name != _ARRAYS:
        kind = _KINDS[name]
        numbers = {attribute: int(getattr(leaf, attribute)) for attribute in (*kind.progress, *kind.settings)}
        if kind.grows or name == "ConcatenateKVCache":  # the rest is room, or what was trimmed away
            named = {key: array if array is None else array[:, :, : numbers["offset"]] for key, array in named.items()}
    if any(array is not None and array.ndim and array.shape[0] != 1 for key, array in named.items()):
        raise PionMlxCompatError(f"{name} holds a batch of sequences; a prefix is one sequence")
    tensors = {key: _tensor(array) for key, array in named.items() if array is not None}
    state = State(name, numbers, tensors, tuple(key for key, array in named.items() if array is None))
    return state if count is None else _cut(state, count)


def _cut(state: State, count: int) -> State:
    """The first tokens of a state whose leaf was `whole`.

    Raises:
        ValueError: it has fewer.
    """
    numbers = dict(state.numbers)
    if not 0 < count <= numbers.get("offset", 0):
        raise ValueError(f"a {state.name} of {numbers.get('offset')} tokens cannot be cut to {count}")
    if count == numbers["offset"]:
        return state
    numbers["offset"] = count
    if "_idx" in numbers:
        numbers["_idx"] = count
    tensors = {}
    for key, tensor in state.tensors.items():
        kept = tensor.words[:, :, :count]
        if state.name == "ChunkedKVCache":  # its capacity decides, in some versions, what is dropped from its front
            kept = _padded(kept, -count % _CHUNK_STEP)
        tensors[key] = Tensor(tensor.dtype, kept)
    return State(state.name, numbers, tensors, state.absent)


def _padded(array: np.ndarray[Any, Any], room: int) -> np.ndarray[Any, Any]:
    batch, heads, count, size = array.shape
    out = np.zeros((batch, heads, count + room, size), array.dtype)
    out[:, :, :count] = array
    return out


# --- and put together ------------------------------------------------------------------------------------------------


def give(leaf: Any, state: State, count: int | None = None, room: int = 0, like: Shapes | None = None) -> list[Any]:
    """Make a fresh leaf hold a state.

    Args:
        leaf: of the class the state was taken from, as the model makes it.
        state: its arrays are copied.
        count: only the first tokens, of a state whose leaf was `whole`.
        room: tokens that arrays which grow are made longer by.
        like: what the model's own leaf has behind one token; a state of other arrays is refused.

    Returns:
        The arrays that were made, for evaluation.

    Raises:
        ValueError: the state is not one of this leaf's.
    """
    name = _named(leaf)
    if state.name != name:
        raise ValueError(f"the state of a {state.name} for a {name}")
    if like is not None:
        _check_shapes(state, like)
    _check_tokens(state)
    if count is not None:
        state = _cut(state, count)
    if name == _ARRAYS:
        return _give_arrays(leaf, state)
    kind = _KINDS[name]
    wanted = {f"{side}.{part}" for side in kind.arrays for part in range(3)} if kind.triples else {*kind.arrays}
    empty = set(state.absent) == {*kind.arrays} and not state.tensors
    if {*state.numbers} != {*kind.progress, *kind.settings} or ({*state.tensors} != wanted and not empty):
        raise ValueError(f"the state of a {name} with other parts than that has")
    if any(getattr(leaf, setting) != state.numbers[setting] for setting in kind.settings):
        raise ValueError(f"the state of a {name} that was made with other settings")
    if any(tensor.words.ndim != 4 for tensor in state.tensors.values()):
        raise ValueError(f"the state of a {name} with arrays of other than four dimensions")
    arrays = {key: _array(tensor, room if kind.grows else 0) for key, tensor in state.tensors.items()}
    for side in kind.arrays:
        triple = tuple(arrays[f"{side}.{part}"] for part in range(3)) if kind.triples and not empty else None
        setattr(leaf, side, triple if triple is not None else arrays.get(side))
    for attribute in kind.progress:
        setattr(leaf, attribute, state.numbers[attribute])
    return list(arrays.values())


def _check_shapes(state: State, like: Shapes) -> None:
    """The arrays must be those the model makes, but for their tokens."""
    if missing := like.keys() - state.tensors.keys():
        raise ValueError(f"the state of a {state.name} without {' and '.join(sorted(missing))}")
    for key, tensor in state.tensors.items():
        found = tensor.dtype, tuple(tensor.words.shape)
        if key in _PADDING and key not in like:
            continue
        dtype, shape = like.get(key, ("nothing", ()))
        open_at = 2 if state.name != _ARRAYS and len(shape) == 4 else len(shape)  # the axis of tokens
        alike = len(found[1]) == len(shape) and all(
            have == want or axis == open_at for axis, (have, want) in enumerate(zip(found[1], shape, strict=True))
        )
        if not alike or found[0] != dtype:
            raise ValueError(f"{key} of a {state.name} is {found[0]} {found[1]}, this model's is {dtype} {shape}")


def _check_tokens(state: State) -> None:
    """What a state says of its tokens must be what its arrays can hold."""
    numbers, offset = state.numbers, state.numbers.get("offset", 0)
    lengths = {tensor.words.shape[2] for tensor in state.tensors.values() if tensor.words.ndim == 4}
    if state.name == _ARRAYS or not state.tensors:
        right = offset == 0
    elif len(lengths) != 1:
        right = False
    elif state.name == "RotatingKVCache":
        held, size, at = lengths.pop(), numbers.get("max_size", 0), numbers.get("_idx", -1)
        right = 0 < at <= held and min(offset, size) <= held and (offset > size or at == offset)
    elif state.name == "ChunkedKVCache":
        first = numbers.get("start_position", -1)
        right = 0 <= first <= offset and 0 < offset - first <= lengths.pop()
    else:
        right = lengths == {offset} and offset > 0
    if not right:
        raise ValueError(f"the state of a {state.name} whose numbers {numbers} are not those of its arrays")


def _give_arrays(leaf: Any, state: State) -> list[Any]:
    names = {*state.tensors, *state.absent}
    wanted = {*map(str, range(len(leaf.cache))), *_PADDING}
    if names != wanted:
        raise ValueError(f"the state of an ArraysCache of {len(names) - 2} for one of {len(leaf.cache)}")
    arrays = {key: _array(tensor, 0) for key, tensor in state.tensors.items()}
    for attribute in _PADDING:
        if attribute in arrays or hasattr(leaf, attribute):
            setattr(leaf, attribute, arrays.get(attribute))
    leaf.cache = [arrays.get(str(number)) for number in range(len(leaf.cache))]
    return list(arrays.values())


def _array(tensor: Tensor, room: int) -> Any:
    mx, _ = mlx_modules()
    held = _padded(tensor.words, room) if room else np.require(tensor.words, requirements=["C", "A"])
    array = mx.array(held)
    return array.view(mx.bfloat16) if tensor.dtype == "bfloat16" else array
