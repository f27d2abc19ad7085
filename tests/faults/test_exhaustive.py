"""Every call of a history broken in every way: what was acknowledged is there, what was dropped is gone."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import disk
from tests.faults.harness import FAIL, FULL, SHORT, STOP, Runner, build, check, model_of, power_cuts
from tests.faults.history import Step, twelve

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the shim replaces functions of glibc"),
    pytest.mark.timeout(900),
]

MODES = {
    "stop": (STOP, 0),
    "EIO": (FAIL, errno.EIO),
    "ENOSPC": (FAIL, errno.ENOSPC),
    "EINTR": (FAIL, errno.EINTR),
    "short write": (SHORT, 0),
    "full disk": (FULL, errno.ENOSPC),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(build(tmp_path_factory.mktemp("shim")))
    yield running
    running.close()


def every_call(runner: Runner, folder: Path, steps: list[Step], policy: str, modes: list[str]) -> tuple[int, list[str]]:
    """Points tried, and what went wrong."""
    clean = runner.play(folder / "clean", steps, policy=policy, close=True)
    assert clean.acked == [True] * len(steps), [step.text for step in steps]
    problems = check(runner, folder / "clean", model_of(steps, clean), "no fault")
    points = 0
    for name in modes:
        mode, error = MODES[name]
        for at in range(clean.count):
            root = folder / "data"
            shutil.rmtree(root, ignore_errors=True)
            played = runner.play(root, steps, policy=policy, mode=mode, at=at, errno=error, close=mode == STOP)
            problems += check(runner, root, model_of(steps, played), f"{name} at call {at}")
            points += 1
    return points, problems


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["everysec", "always"])
def test_every_call_of_twelve_steps(
    runner: Runner, tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    points, problems = every_call(runner, tmp_path, twelve(), policy, list(MODES))
    with capsys.disabled():
        print(f"\n{points} fault points with appendfsync {policy}")
    assert not problems, "\n".join(problems[:40])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["everysec", "always"])
def test_every_power_cut_of_twelve_steps(
    runner: Runner, tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, log = twelve(), tmp_path / "log"
    played = runner.play(tmp_path / "data", steps, policy=policy, log=str(log), close=True)
    calls = list(disk.read_log(log))
    problems = power_cuts(runner, tmp_path, steps, calls, played)
    with capsys.disabled():
        print(f"\n{3 * sum(call.op != disk.MARK for call in calls)} power cuts with appendfsync {policy}")
    assert not problems, "\n".join(problems[:40])
