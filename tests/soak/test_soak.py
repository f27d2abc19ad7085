"""Half a minute of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_half_a_minute_under_load_with_kills(tmp_path: Path) -> None:
    lines: list[str] = []
    report = soak(30, 7, tmp_path, lines.append)
    assert report.violations == [], report.text()
    assert report.figures["SIGKILL"] >= 1
    assert min(report.figures.get(what, 0) for what in ("store", "fetch", "others", "drop", "half", "get")) > 20
