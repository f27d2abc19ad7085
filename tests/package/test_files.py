"""Rules about the source files themselves."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = {".py": 450, ".pyi": 450, ".pxd": 450, ".pyx": 1000, ".h": 800, ".c": 800}
TESTS = 800


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_files_stay_readable_in_length() -> None:
    names = {path: str(path.relative_to(ROOT)) for path in tracked() if path.suffix in LIMITS}
    lengths = {path: len(path.read_text().splitlines()) for path in names}
    limits = {path: TESTS if name.startswith("tests/") else LIMITS[path.suffix] for path, name in names.items()}
    too_long = {names[path]: n for path, n in lengths.items() if n > limits[path]}
    assert too_long == {}
    assert len(lengths) > 50


def test_nothing_is_left_to_do_in_the_sources() -> None:
    mark = re.compile("TO" + "DO|FIX" + "ME|XX" + "X:")
    marked = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix in LIMITS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    assert marked == []


def test_generated_files_are_not_tracked() -> None:
    odd = [
        path.name
        for path in tracked()
        if path.suffix in {".so", ".o", ".pyc"} or ("_core" in path.parts and path.suffix == ".c")
    ]
    assert odd == []


def test_every_package_folder_has_a_docstring() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.name == "__init__.py" and "pion" in path.parts and not path.read_text().lstrip().startswith('"""')
    ]
    assert bare == []
