"""What the arguments of `PionPromptCache` may be; each refusal names the argument."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["check_arguments", "checked_checkpoints", "checked_wait", "text_namespace"]

_NUMBERS = "checkpoints must be a positive number of tokens, or numbers of tokens"


def check_arguments(host: Any, port: Any, vquant: Any, prefill_chunk_size: Any, **counts: Any) -> None:
    """Types of what the constructor takes.

    Args:
        counts: numbers that are not negative, by name.

    Raises:
        TypeError: another type.
        ValueError: a number out of range.
    """
    for name, text in (("host", host), ("vquant", vquant)):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a str, not {type(text).__name__}")
    if not _whole(port):
        raise TypeError(f"port must be an int, not {type(port).__name__}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be 0 to 65535, not {port}")
    if prefill_chunk_size is not None and not _whole(prefill_chunk_size):
        raise TypeError(f"prefill_chunk_size must be an int or None, not {type(prefill_chunk_size).__name__}")
    if prefill_chunk_size is not None and prefill_chunk_size < 0:
        raise ValueError("prefill_chunk_size must be a positive number of tokens, or None for one pass")
    for name, count in counts.items():
        if not _whole(count):
            raise TypeError(f"{name} must be an int, not {type(count).__name__}")


def _whole(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def checked_wait(wait: Any) -> float:
    """Seconds; None: without limit.

    Raises:
        TypeError, ValueError: it is no number of seconds.
    """
    if wait is None:
        return math.inf
    if isinstance(wait, bool) or not isinstance(wait, numbers.Real):
        raise TypeError(f"wait must be a number of seconds, or None for no limit, not {type(wait).__name__}")
    if not float(wait) >= 0:
        raise ValueError(f"wait must be a number of seconds, or None for no limit, not {wait}")
    return float(wait)


def checked_checkpoints(checkpoints: Any) -> Any:
    """The same checkpoints: None, a step, or numbers of tokens.

    Raises:
        ValueError: they are something else.
    """
    if checkpoints is None:
        return None
    if _whole(checkpoints):
        if checkpoints < 1:
            raise ValueError(_NUMBERS)
        return int(checkpoints)
    if isinstance(checkpoints, str | bytes) or not hasattr(checkpoints, "__iter__"):
        raise ValueError(f"{_NUMBERS}, not {checkpoints!r}")
    found = list(checkpoints)
    if not all(_whole(at) for at in found):
        raise ValueError(f"{_NUMBERS}, not {found[:8]!r}")
    return [int(at) for at in found]


def text_namespace(namespace: Any) -> str:
    """The same namespace.

    Raises:
        TypeError: it is no str.
    """
    if not isinstance(namespace, str):
        raise TypeError(f"a namespace is a str, not {type(namespace).__name__}; make_namespace() makes one")
    return namespace
