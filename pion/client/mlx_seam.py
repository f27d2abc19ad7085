"""The place in mlx-lm where the attention patch goes: is it as the patch needs it?

mlx-lm is imported inside functions.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any, Final, TypedDict

from pion.client.mlx_arrays import PionMlxCompatError

__all__ = ["SeamReport", "check_seam", "mlx_lm_seam_report"]

EXPECTED: Final = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
OLDEST: Final = "0.20.1"
NEWEST: Final = "0.32.2"  # tested
_BELOW: Final = (0, 33)
_SYMBOLS: Final = (
    ("mlx_lm.models.base", "scaled_dot_product_attention"),
    ("mlx_lm.models.cache", "make_prompt_cache"),
)
ORIGINAL: Final = "_pion_original"  # attribute of a replaced function that holds what it replaced


class SeamReport(TypedDict):
    """What of mlx-lm the patch depends on.

    Attributes:
        mlx_lm_version: None when mlx-lm is not there.
        tested_range, max_tested: versions that were tried.
        sdpa_params: of ``scaled_dot_product_attention`` as mlx-lm has it; None when it is not there.
        expected_sdpa_params: it may have these, or the first of them.
        missing_symbols: names that are not there.
        signature_ok: whether `sdpa_params` are as expected.
    """

    mlx_lm_version: str | None
    tested_range: str
    max_tested: str
    sdpa_params: list[str] | None
    expected_sdpa_params: list[str]
    missing_symbols: list[str]
    signature_ok: bool


def mlx_lm_seam_report() -> SeamReport:
    """What mlx-lm has where the attention patch goes. Never raises."""
    return _looked()[0]


def _looked() -> tuple[SeamReport, BaseException | None]:
    report = SeamReport(
        mlx_lm_version=None, tested_range=f">={OLDEST},<{'.'.join(map(str, _BELOW))}", max_tested=NEWEST,
        sdpa_params=None, expected_sdpa_params=list(EXPECTED), missing_symbols=[], signature_ok=False,
    )  # fmt: skip
    reason: BaseException | None = None
    for module, name in _SYMBOLS:
        try:
            found = getattr(__import__(module, fromlist=[name]), name, None)
        except Exception as error:  # whatever an import may raise
            found, reason = None, reason or error
        if not callable(found):
            report["missing_symbols"].append(f"{module}.{name}")
        elif name == "scaled_dot_product_attention":
            report["sdpa_params"] = _parameters(found)
    params = report["sdpa_params"]
    report["signature_ok"] = params is not None and len(params) >= 6 and tuple(params) == EXPECTED[: len(params)]
    try:
        import mlx_lm

        version = getattr(mlx_lm, "__version__", None)
        report["mlx_lm_version"] = str(version) if version is not None else None
    except Exception as error:
        reason = reason or error
    return report, reason


def _parameters(function: Any) -> list[str] | None:
    try:
        return list(inspect.signature(getattr(function, ORIGINAL, function)).parameters)
    except (TypeError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_seam() -> None:
    """Whether the patch fits the mlx-lm that is installed.

    Warns:
        RuntimeWarning: it fits a version that is newer than any that was tried.

    Raises:
        PionMlxCompatError: it does not, or there is no mlx-lm; the text says what was found.
    """
    report, reason = _looked()
    version = report["mlx_lm_version"]
    if version is None and report["missing_symbols"]:
        raise PionMlxCompatError(
            f"the attention patch needs mlx-lm {report['tested_range']}: {reason or 'it is not there'} "
            "(python -m pip install 'pion-server[mlx]')"
        ) from reason
    if report["missing_symbols"]:
        missing = " and no ".join(report["missing_symbols"])
        raise PionMlxCompatError(f"mlx-lm {version} has no {missing}; nothing was patched") from reason
    if version is not None and _numbers(version) < _numbers(OLDEST):
        raise PionMlxCompatError(f"mlx-lm {version} is older than {OLDEST}; nothing was patched")
    if not report["signature_ok"]:
        raise PionMlxCompatError(
            f"mlx-lm {version}: scaled_dot_product_attention has the parameters {report['sdpa_params']}, not "
            f"{report['expected_sdpa_params']} or the first of them; nothing was patched"
        )
    if version is not None and _numbers(version)[:2] >= _BELOW:
        warnings.warn(
            f"mlx-lm {version} is newer than {NEWEST}, the newest the attention patch was tried with; it looks alike",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip
