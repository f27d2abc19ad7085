"""The arguments of ATTEND.PREFIX.*: sizes are checked before anything is made of the bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pion.commands import args
from pion.errors import ColdMissError, CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

_NUMBER: Final = re.compile(rb"[+-]?[0-9]+")  # meant as one; whether it is one is told apart
_LONGEST: Final = len("WITHMASS")


class Rest(NamedTuple):
    """What may stand behind the required arguments: `[fa_window [selector]]`, and in any place our options."""

    window: int
    quest: bool
    words: frozenset[bytes]
    sinks: bytes | None


def rest(name: str, argv: Sequence[bytes], *, option: bytes = b"", selector: bool = False) -> Rest:
    """Read it.

    Args:
        name: of the command.
        option: the word without a value that it takes.
        selector: whether it takes one.

    Raises:
        CommandError: anything else stands there.
    """
    plain: list[int] = []
    words: set[bytes] = set()
    sinks = None
    i = 0
    while i < len(argv):
        word = args.upper(argv[i]) if len(argv[i]) <= _LONGEST else b""
        if word and word == option:
            words.add(word)
        elif word == b"SINKS":
            if i + 1 == len(argv):
                raise CommandError("ERR SINKS needs a blob of one fp32 logit for each query head")
            i += 1
            sinks = argv[i]
        elif len(plain) > selector or not _NUMBER.fullmatch(argv[i]):
            expected = ["fa_window", *["selector"] * selector, "SINKS", *[option.decode()] * bool(option)]
            raise CommandError(f"ERR {name} unknown option '{args.text(argv[i][:64])}' ({', '.join(expected)})")
        else:
            plain.append(args.integer(argv[i]))
        i += 1
    window = plain[0] if plain else -1
    return Rest(window, len(plain) > 1 and plain[1] == 1, frozenset(words), sinks)


def layer(raw: bytes) -> int:
    layer = args.integer(raw)
    if layer < 0:
        raise CommandError("ERR invalid layer_id (must be >= 0)")
    return layer


def numbers(argv: Sequence[bytes], text: str, low: int = 1) -> list[int]:
    """Integers of at least `low`."""
    values = [args.integer(raw) for raw in argv]
    if min(values) < low:
        raise CommandError(text)
    return values


def refuse_cold(ctx: Context, sid: bytes, layer: int) -> None:
    """Several commands tell that a layer is cold before they look at the sizes of what they were sent."""
    attention = ctx.server.attention
    if not attention.autowarm and attention.lookup(sid, layer) == "COLD":
        raise ColdMissError


def rows(blob: bytes | memoryview, row: int, text: str) -> int:
    """How many rows of `row` fp32 values a blob has: at least one."""
    count, over = divmod(len(blob), 4 * row)
    if over or not count:
        raise CommandError(text)
    return count


def size(blob: bytes | memoryview, count: int, text: str) -> None:
    if len(blob) != count:
        raise CommandError(text)


def sinks_size(rest: Rest, heads: int, rows: int = 1) -> None:
    if rest.sinks is not None and len(rest.sinks) not in (4 * heads, 4 * heads * rows):
        raise CommandError("ERR SINKS blob size must be H_q*4, or H_q*M*4")


def array(blob: bytes | memoryview, *shape: int) -> Any:
    import numpy as np

    flat = np.frombuffer(blob, "<f4")
    if not flat.flags.aligned:  # a view into a request: the same bytes give the same bits wherever they lay
        flat = flat.copy()
    return flat.reshape(shape)


def sinks(rest: Rest, heads: int) -> Any:
    if rest.sinks is None:
        return None
    return array(rest.sinks, heads) if len(rest.sinks) == 4 * heads else array(rest.sinks, heads, -1)


def head_map(raw: bytes, heads: int, kv_heads: int) -> Any:
    """Heads of K/V by query head; an empty map is the usual one."""
    import numpy as np

    return np.frombuffer(raw, np.uint8) if raw else np.arange(heads) // (heads // kv_heads)


def check_map(raw: bytes, kv_heads: int) -> None:
    if raw and max(raw) >= kv_heads:
        raise CommandError(f"ERR head_map values must be below H_kv ({kv_heads})")
