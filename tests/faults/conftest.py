"""Directories to damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import damage
from tests.faults.damage import Model
from tests.faults.trial import Trial


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Model]]:
    """The same directory after an end in order and after SIGKILL."""
    folder = tmp_path_factory.mktemp("templates")
    out = {}
    for name in ("closed", "killed"):
        out[name] = folder / name, damage.make(folder / name, killed=name == "killed")
    return out


@pytest.fixture
def trial(
    request: pytest.FixtureRequest, templates: dict[str, tuple[Path, Model]], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> Trial:  # fmt: skip
    """A copy of one of them; of the killed one unless asked for another."""
    return Trial(templates[getattr(request, "param", "killed")], tmp_path / "data", caplog)
