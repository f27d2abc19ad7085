"""How far a long prefill has come: a function of the caller's, or a bar of tqdm's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["Progress", "shown"]

Progress = Callable[[int, int], Any]
"""Called with (tokens done, tokens in all)."""

_LONG: Final = 2048  # tokens from which on a bar is worth its line


@contextlib.contextmanager
def shown(progress: Progress | None, done: int, total: int) -> Iterator[Progress | None]:
    """What to call after each pass: `progress`, or where there is none and somebody sits in front of it, a bar.

    A bar needs tqdm, which is not required, and a terminal at stderr.
    """
    if progress is not None:
        progress(done, total)
        yield progress
        return
    bar = None
    if total - done >= _LONG and sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

            bar = tqdm(total=total, initial=done, unit="tok", desc="prefill", leave=False)
    if bar is None:
        yield None
        return
    with bar:
        yield lambda now, _total: bar.update(now - bar.n)
