"""One prefix over the wire: looked up, registered, stored and fetched, as steps for a connection pool.

A store is one flight of commands behind its REGISTER, packed as the socket takes them: the rows, then the states. A
fetch takes the states in one flight, and then the rows by the fastest way there is (lanes.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pion.client import calls
from pion.client.caches import Layout
from pion.client.connection import Command, Flight, Steps, expect_ok, raise_first
from pion.client.errors import IncompleteError, reply_error
from pion.client.formats import KEPT, Sides, described, registration
from pion.client.lanes import Lanes, Pairs
from pion.client.manifest import Manifest, held_tokens
from pion.client.mapped import lane_command
from pion.errors import CommandError, MismatchError, utf8
from pion.wire.resp import ReplyError

__all__ = [
    "Entry",
    "Found",
    "Parts",
    "Rows",
    "fetch",
    "formats_of",
    "lines_of",
    "lookup",
    "match_command",
    "names_of",
    "read",
    "register",
    "send",
]

_NEAR: Final = 4  # prefixes that begin alike to look at
_WIRE: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}

Rows = Iterable[tuple[int, int, np.ndarray[Any, Any]]]
"""(layer, side, rows) of a prompt cache; side 0 = K, 1 = V."""


@dataclass(frozen=True)
class Entry:
    """An entry as it was described at one moment.

    Attributes:
        namespace: its name.
        infos: V.INFO of K and of V.
        manifest: what it consists of; None: rows alone, by another writer.
        ids: its tokens, when they were asked for.
        offer: what KV.PREFIX.LANE said, when it was asked.
    """

    namespace: str
    infos: list[Any]
    manifest: Manifest | None
    ids: np.ndarray[Any, np.dtype[np.uint32]] | None = None
    offer: Any = None

    @property
    def digest(self) -> str | None:
        """That it was registered with."""
        return lines_of(self.infos[0]).get("digest")


@dataclass(frozen=True)
class Found:
    """What a lookup found.

    Attributes:
        outcome: ``hit``, ``miss`` or ``mismatch``.
        reason: of a mismatch.
        entry: of a hit, when it was to be described.
    """

    outcome: str
    reason: str = ""
    entry: Entry | None = None


@dataclass(frozen=True)
class Parts:
    """What was fetched.

    Attributes:
        rows: (K, V) of each layer of rows, mlx arrays (1, H, count + room, D) that nobody else holds.
        states: by number of the leaf, packed.
    """

    rows: list[tuple[Any, Any]]
    states: dict[int, Any]


def lookup(namespace: str, digest: str | None, *, describe: bool = False, offer: bool = False) -> Steps[Found]:
    """Whether the server has the whole prefix.

    Args:
        namespace, digest: the prefix; without a digest any will do.
        describe: also say what is there, for `fetch`.
        offer: have its file offered at once, too.
    """
    commands: list[list[Any]] = [
        ["KV.PREFIX.LOOKUP", utf8(namespace, "the namespace"), *(["DIGEST", digest] if digest else [])]
    ]
    if describe:
        commands += [*_infos(namespace), ["SSM.PREFIX.FETCH", namespace, 0]]
        commands += [lane_command(namespace)] if offer else []
    found, *more = yield Flight(commands)
    if isinstance(found, ReplyError):
        error = reply_error(str(found))
        if not isinstance(error, MismatchError):
            raise error
        return Found("mismatch", str(error))
    if found != "HIT":
        return Found("miss")
    if describe and any(_absent(info) for info in more[:2]):
        return Found("miss", "it was dropped behind the lookup")
    return Found("hit", "", _entry(namespace, more) if describe else None)


def match_command(near: tuple[str, bytes]) -> list[Any]:
    """The question which prefixes of a scope begin with these hashes of blocks."""
    scope, hashes = near
    return ["KV.PREFIX.MATCH", scope, len(hashes) // 8, hashes, "LIMIT", _NEAR]


def names_of(reply: Any) -> list[str]:
    """The namespaces in a reply of KV.PREFIX.MATCH."""
    if not isinstance(reply, list):  # a server that does not know the command
        return []
    names = [row[0] for row in reply if isinstance(row, list) and row and isinstance(row[0], bytes)]
    found = []
    for name in names:
        with contextlib.suppress(UnicodeDecodeError):  # another client's: nothing here is stored under such a name
            found.append(name.decode())
    return found


def _entry(namespace: str, replies: Sequence[Any]) -> Entry:
    raise_first(replies[:3])
    *infos, manifest = replies[:3]
    offer = replies[3] if len(replies) > 3 else None
    try:
        return Entry(namespace, infos, None if manifest is None else Manifest.parse(manifest), offer=offer)
    except ValueError as error:
        raise IncompleteError(str(error)) from error


def read(namespace: str) -> Steps[Entry | None]:
    """An entry with its tokens, which are proved to be those of its digest; None: there is none that says its tokens.

    Raises:
        IncompleteError: it says something that cannot be.
        CommandError: the server refused.
    """
    replies = yield Flight([*_infos(namespace), *(["SSM.PREFIX.FETCH", namespace, number] for number in (0, 1))])
    if any(isinstance(reply, ReplyError) for reply in replies[:2]):  # dropped since
        return None
    *described_, ids = replies
    entry = _entry(namespace, described_)
    if entry.manifest is None or ids is None:
        return None
    raise_first([ids])
    try:
        return Entry(namespace, entry.infos, entry.manifest, held_tokens(entry.manifest, ids, entry.digest))
    except ValueError as error:
        raise IncompleteError(str(error)) from error


def register(
    namespace: str, layout: Layout, sides: Sides, rows: int, digest: str, prefill_ms: int, blocks: tuple[int, bytes],
    *, states: int, scope: str, replace: bool,
) -> Steps[None]:  # fmt: skip
    """Declare a prefix: shape, formats, what a row is, whose it is, and hashes of its blocks of tokens.

    Args:
        layout: of its layers of rows, which may be none.
        states: how many states belong to it.

    Raises:
        MismatchError: the namespace holds something else, and not `replace`. An incomplete store of the same prefix,
            with other boundaries, is replaced, and so are states that nobody registered: they are left over from a
            store that a DROP overtook.
    """
    layers = layout.cache_len
    command = registration(namespace, layout.kv_dim, sides) if layers else ["KV.PREFIX.REGISTER", namespace, 1, "fp16"]
    size, hashes = blocks
    if hashes:
        command += ["BLOCKS", size, len(hashes) // 8, hashes]
    command += ["PREFILL_MS", prefill_ms, "ROWS", rows, "LAYERS", layers, "DIGEST", digest]
    command += ["STATES", states, "SCOPE", scope]
    if layers:
        command += ["HEADS", layout.n_kv_heads, "HEAD_DIM", layout.head_dim]
        command += ["ROPE", "NONE" if layout.rope is None else f"{layout.rope:g}"]
    flight: list[list[Any]] = [[*command, "REPLACE"] if replace else command, _infos(namespace)[0]]
    reply, info = yield Flight(flight)
    if not replace and isinstance(reply, ReplyError) and reply.code == "MISMATCH":
        lines = lines_of(info) if isinstance(info, bytes) else {}
        unfinished = lines.get("digest") == digest and lines.get("states") != str(states)
        if unfinished or _absent(info):
            (reply,) = yield Flight([[*command, "REPLACE"]])
    expect_ok(reply, str(command[0]))


def send(
    namespace: str, digest: str, dtype: str, count: int, rows: Rows, states: Mapping[int, Any], tail: Sequence[Command]
) -> Steps[None]:
    """Store rows, in the words the model has, which the server turns into the format of the entry, and states.

    Args:
        tail: sent behind them; its replies are nobody's business.

    Raises:
        CommandError: the first refusal. A prefix that is incomplete by it is dropped again.
        IncompleteError: the entry was dropped or replaced meanwhile: what it holds now is another's work, and whole.
    """
    layers: set[int] = set()

    def commands() -> Iterator[Command]:
        for layer, side, data in rows:
            layers.add(layer)
            place = _sids(namespace)[side], layer, 0, count
            yield "V.STOREBATCH", *place, data.data, "FMT", _WIRE[dtype], "DIGEST", digest
        for number, state in states.items():
            yield "SSM.PREFIX.STORE", namespace, number, state, "DIGEST", digest
        yield from _infos(namespace)
        yield from tail

    replies = yield Flight(commands())
    *stored, keys, values = replies[: len(replies) - len(tail)]
    if not all(isinstance(info, bytes) and lines_of(info).get("digest") == digest for info in (keys, values)):
        raise_first(reply for reply in stored if not _absent(reply) and getattr(reply, "code", "") != "MISMATCH")
        if any(isinstance(info, ReplyError) for info in (keys, values)):
            raise IncompleteError("the namespace was dropped meanwhile")
        raise IncompleteError("the namespace was given to something else meanwhile")
    try:
        for reply in stored:
            expect_ok(reply, "V.STOREBATCH")
    except CommandError:
        of_states = stored[len(stored) - len(states) :] if states else []
        lost = any(reply != "OK" for reply in of_states)
        if lost or not all(_whole(lines_of(info), len(layers), count) for info in (keys, values)):
            yield from calls.abandon(namespace, digest)
        raise


def _absent(info: Any) -> bool:
    """Whether a reply of V.INFO says that nothing was registered under this name."""
    return isinstance(info, ReplyError) and "not found" in str(info)


def _whole(lines: dict[str, str], layers: int, count: int) -> bool:
    return all(lines.get(f"layer_{layer}_tokens") == str(count) for layer in range(layers))


def _described(info: Any, digest: str, layout: Layout, rows: int, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The format of each layer in a V.INFO reply, if the session is what this model can use."""
    lines = lines_of(info)
    if lines.get("digest") != digest:
        raise IncompleteError("the prefix was replaced behind the lookup")
    if not layout.cache_len:
        return ()
    held = described(lines)
    if held != tuple((layout.kv_dim, fmt) for _, fmt in held) or len(held) != layout.cache_len:
        dims = "/".join(dict.fromkeys(str(dim) for dim, _ in held))
        here = f"{layout.cache_len} layers of {layout.kv_dim}"
        raise MismatchError(f"MISMATCH shape: {len(held)} layers of {dims} values are stored, this model has {here}")
    kept = KEPT[layout.dtype]  # words kept as they were serve any request
    for layer, ((_, fmt), asked) in enumerate(zip(held, wanted, strict=True)):
        if fmt not in (asked, kept):
            where = "" if len({*held}) == 1 == len({*wanted}) else f" (layer {layer})"
            allowed = " or ".join(sorted({asked, kept}))
            raise MismatchError(f"MISMATCH format: stored as {fmt}, asked for as {allowed}{where}")
    short = [layer for layer in range(layout.cache_len) if lines.get(f"layer_{layer}_tokens") != str(rows)]
    if short:
        raise IncompleteError(f"layers {short} do not hold {rows} rows")
    return tuple(fmt for _, fmt in held)


def formats_of(infos: list[Any], digest: str, layout: Layout, rows: int, wanted: Sides) -> Sides:
    """The formats that the layers are stored in, by V.INFO of both sides, when they are what this model can use.

    Args:
        rows: tokens of the prefix.

    Raises:
        MismatchError, IncompleteError, CommandError: as `fetch` does.
    """
    raise_first(infos)
    keys, values = (_described(info, digest, layout, rows, asked) for info, asked in zip(infos, wanted, strict=True))
    return keys, values


def fetch(
    entry: Entry, digest: str, layout: Layout, wanted: Sides, rows: int, count: int, lanes: Lanes
) -> Steps[Parts]:
    """Fetch the first tokens of a prefix.

    Args:
        entry: what `lookup` or `read` said about it.
        digest: it must have.
        layout: of its layers of rows, as this model has them.
        wanted: the formats asked for.
        rows: tokens of the prefix.
        count: tokens to fetch, a number that is usable.
        lanes: the ways to the server.

    Raises:
        MismatchError: the shape or the format is not this model's.
        IncompleteError: something is missing, or the prefix was replaced meanwhile.
        CommandError: the server refused.
    """
    formats = formats_of(entry.infos, digest, layout, rows, wanted)
    pairs: Pairs = []
    if layout.cache_len:
        about = entry.namespace, digest, entry.infos, formats, layout, count
        pairs = yield from lanes.fetch(*about, whole=count == rows, offer=entry.offer)
    numbers = entry.manifest.states_at(count) if entry.manifest is not None else {}
    return Parts(pairs, (yield from _states(entry, numbers)) if numbers else {})


def _states(entry: Entry, numbers: Mapping[int, int]) -> Steps[dict[int, Any]]:
    """The states of these numbers by those of their leaves."""
    asked: list[list[Any]] = [["SSM.PREFIX.FETCH", entry.namespace, number] for number in numbers.values()]
    replies = yield Flight(asked + _infos(entry.namespace))
    _still(entry, replies)
    states = dict(zip(numbers, replies[:-2], strict=True))
    missing = [numbers[leaf] for leaf, state in states.items() if state is None]
    if missing:
        raise IncompleteError(f"states {missing} are missing")
    return states


def _still(entry: Entry, replies: list[Any]) -> None:
    """An entry may be replaced at any time: what came is of `entry` only if it is the same behind it."""
    raise_first(replies)
    if replies[-2:] != entry.infos:
        raise IncompleteError("the prefix was replaced while it was fetched")


def lines_of(info: bytes) -> dict[str, str]:
    """A reply of V.INFO by name."""
    return dict(line.split(":", 1) for line in info.decode("utf-8", "replace").split("\r\n") if ":" in line)


def _infos(namespace: str) -> list[list[Any]]:
    return [["V.INFO", sid] for sid in _sids(namespace)]


def _sids(namespace: str) -> tuple[bytes, bytes]:
    name = utf8(namespace, "the namespace")
    return name + b"_pk", name + b"_pv"
