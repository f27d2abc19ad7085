"""The table of field cases in tests/README.md names tests that exist, and every case with a test stands in it."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| ([A-H]\d+) \| .+ \| (.+) \|$", re.MULTILINE)


def _rows() -> dict[str, list[str]]:
    found = ROW.findall((TESTS / "README.md").read_text())
    assert len(found) == len({case for case, _ in found})
    return {case: re.findall(r"`([^`]+)`", cell) for case, cell in found}


def _tests(path: Path) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)


def test_every_named_test_exists() -> None:
    for case, names in _rows().items():
        assert names, case
        for name in names:
            file, _, pattern = name.partition("::")
            held = _tests(TESTS / file)
            assert fnmatch.filter(held, pattern or f"test_*{case.lower()}_*"), f"{case}: no test is called {name}"


def test_every_case_with_a_test_is_in_the_table() -> None:
    rows = _rows()
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS).as_posix()
        for name in _tests(path):
            found = re.match(r"test_((?:[a-h]\d+_)+)", name)
            for case in found[1].rstrip("_").upper().split("_") if found else []:
                assert case in rows, f"{file}::{name}"
