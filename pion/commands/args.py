"""Turning arguments into numbers and options, as strictly as Redis does, and numbers back into text."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from pion import errors
from pion.errors import CommandError

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1

_INTEGER: Final = re.compile(rb"0|-?[1-9][0-9]{0,18}")
# What C's strtod accepts without leading blanks.
_FLOAT: Final = re.compile(
    rb"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)"
    rb"(?:[pP][+-]?[0-9]+)?|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?)"
)
_EXPONENT_MAX: Final = 5000  # an x87 long double ends at 1e4932: beyond, no need to build the number


def integer(raw: bytes, error: str = errors.NOT_INTEGER) -> int:
    """A signed 64-bit integer in Redis's canonical form (no `+`, blanks, leading zeros or `-0`).

    Raises:
        CommandError: with the text `error`.
    """
    if _INTEGER.fullmatch(raw):
        value = int(raw)
        if INT64_MIN <= value <= INT64_MAX:
            return value
    raise CommandError(error)


def integer_in(raw: bytes, low: int, high: int, error: str) -> int:
    """`integer` bounded to [low, high]; both failures answer `error`."""
    value = integer(raw, error)
    if not low <= value <= high:
        raise CommandError(error)
    return value


def count(raw: bytes) -> int:
    """A non-negative `int` argument."""
    value = integer(raw)
    if value < 0:
        raise CommandError(errors.NOT_POSITIVE)
    return value


def double(raw: bytes, error: str = errors.NOT_FLOAT) -> float:
    """A C double: decimal, hexadecimal or infinity, never NaN. Text too large for a double is refused, as in Redis."""
    if not _FLOAT.fullmatch(raw):
        raise CommandError(error)
    text = raw.decode()
    if "x" in text.lower():
        try:
            return float.fromhex(text)
        except OverflowError:
            raise CommandError(error) from None
    value = float(text)
    if value in (float("inf"), float("-inf")) and "inf" not in text.lower():
        raise CommandError(error)
    return value


def upper(raw: bytes) -> bytes:
    """An option name for comparing."""
    return bytes(raw).upper()


def text(raw: bytes) -> str:
    """Bytes as text for messages; undecodable bytes survive a round trip."""
    return bytes(raw).decode("utf-8", "surrogateescape")


# --- long double ---------------------------------------------------------------------------------------------------
# INCRBYFLOAT and HINCRBYFLOAT compute in C's long double. Its width differs between machines (64-bit mantissa on
# x86, 53 on Apple silicon), so the x87 format is computed here in exact fractions: every machine answers the same.


def long_double(raw: bytes, error: str = errors.NOT_FLOAT) -> Fraction | None:
    """The x87 long double nearest to the text; None = an infinity.

    Raises:
        CommandError: `error`, when the text is no number or overflows.
    """
    if not _FLOAT.fullmatch(raw) or len(raw) > 255:
        raise CommandError(error)
    body = raw.decode().lower()
    if "inf" in body:
        return None
    mantissa, mark, exponent = body.partition("p" if "x" in body else "e")
    power = int(exponent) if mark else 0
    if abs(power) > 4 * _EXPONENT_MAX:
        raise CommandError(error)
    if "x" in body:
        digits, _, tail = mantissa.replace("0x", "").partition(".")
        value = Fraction(int(digits + tail or "0", 16)) / 16 ** len(tail) * Fraction(2) ** power
    else:
        value = Fraction(mantissa) * Fraction(10) ** power
    rounded = round_long_double(value)
    if rounded is None:
        raise CommandError(error)
    return rounded


def round_long_double(value: Fraction) -> Fraction | None:
    """Rounds to a 64-bit mantissa, nearest even; None when the result overflows."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length() - 64
    scaled = abs(value) / Fraction(2) ** exponent
    while scaled >= 1 << 64:
        scaled, exponent = scaled / 2, exponent + 1
    while scaled < 1 << 63:
        scaled, exponent = scaled * 2, exponent - 1
    mantissa = round(scaled)
    if mantissa.bit_length() + exponent > 16_384:
        return None
    rounded = mantissa * Fraction(2) ** exponent
    return rounded if value > 0 else -rounded


def format_long_double(value: Fraction) -> bytes:
    """`%.17Lf` without trailing zeros: how Redis stores the result of INCRBYFLOAT."""
    scaled = round(value * 10**17)
    whole, part = divmod(abs(scaled), 10**17)
    out = f"{whole}.{part:017d}".rstrip("0").rstrip(".")
    return (f"-{out}" if scaled < 0 else out).encode()


def format_double(value: float) -> bytes:
    """The shortest text that reads back as the same double: `3`, `1.5`, `inf`, `1e+100`."""
    if value != value or value in (float("inf"), float("-inf")):
        return repr(value).encode()
    if value == int(value) and abs(value) < 1e17:
        return b"-0" if value == 0 and str(value)[0] == "-" else str(int(value)).encode()
    return repr(value).encode()


# --- patterns ------------------------------------------------------------------------------------------------------


def glob_match(pattern: bytes, subject: bytes, nocase: bool = False) -> bool:
    """Redis's glob: `*`, `?`, `[a-c]`, `[^x]`, `\\` quotes the next byte."""
    return compile_glob(pattern, nocase).fullmatch(subject) is not None


def compile_glob(pattern: bytes, nocase: bool = False) -> re.Pattern[bytes]:
    """A regular expression equal to the glob.

    Everything between two stars has a fixed length, so its leftmost match is as good as any other: atomic groups keep
    the cost at pattern times subject for every pattern (`a*a*a*a*b` against a long run of `a` included).
    """
    segments: list[bytes] = []
    current: list[bytes] = []
    i, n = 0, len(pattern)
    while i < n:
        char = pattern[i : i + 1]
        i += 1
        if char == b"*":
            segments.append(b"".join(current))
            current = []
        elif char == b"?":
            current.append(b".")
        elif char == b"[":
            piece, i = _char_class(pattern, i)
            current.append(piece)
        else:
            if char == b"\\" and i < n:
                char = pattern[i : i + 1]
                i += 1
            current.append(re.escape(char))
    flags = re.DOTALL | (re.IGNORECASE if nocase else 0)
    if not segments:
        return re.compile(b"".join(current), flags)
    middle = b"".join(b"(?>.*?" + segment + b")" for segment in segments[1:] if segment)
    return re.compile(segments[0] + middle + b".*" + b"".join(current), flags)


def _char_class(pattern: bytes, i: int) -> tuple[bytes, int]:
    """The class that opened before index `i`; returns the expression and the index behind `]`."""
    negate = pattern[i : i + 1] == b"^"
    i += negate
    allowed: set[int] = set()
    n = len(pattern)
    while i < n and pattern[i] != ord("]"):
        if pattern[i] == ord("\\") and i + 1 < n:
            i += 1
            allowed.add(pattern[i])
            i += 1
        elif i + 2 < n and pattern[i + 1] == ord("-"):
            low, high = sorted((pattern[i], pattern[i + 2]))
            allowed.update(range(low, high + 1))
            i += 3
        else:
            allowed.add(pattern[i])
            i += 1
    members = (set(range(256)) - allowed) if negate else allowed
    if not members:
        return b"(?!)", i + 1
    return b"[" + b"".join(b"\\x%02x" % member for member in sorted(members)) + b"]", i + 1
