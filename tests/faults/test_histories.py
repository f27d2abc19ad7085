"""Random histories: with faults and power cuts under the shim, and with kills of the real server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import disk, kills
from tests.faults.harness import Runner, build, power_cuts
from tests.faults.history import random_history
from tests.faults.test_exhaustive import MODES, every_call

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the shim replaces functions of glibc"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(build(tmp_path_factory.mktemp("shim")))
    yield running
    running.close()


@pytest.mark.parametrize("seed", range(4))
def test_faults_in_random_histories(
    runner: Runner, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ["everysec", "always"][seed % 2]
    modes = list(MODES)[seed % 3 :: 2]
    points, problems = every_call(runner, tmp_path, random_history(seed, 16), policy, modes)
    with capsys.disabled():
        print(f"\n{points} fault points in history {seed}")
    assert not problems, "\n".join(problems[:40])


@pytest.mark.parametrize("seed", range(4))
def test_power_cuts_in_random_histories(
    runner: Runner, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, log = random_history(100 + seed, 16), tmp_path / "log"
    policy = ["everysec", "always"][seed % 2]
    played = runner.play(tmp_path / "data", steps, policy=policy, log=str(log), close=True)
    calls = list(disk.read_log(log))
    problems = power_cuts(runner, tmp_path, steps, calls, played)
    with capsys.disabled():
        print(f"\n{3 * sum(call.op != disk.MARK for call in calls)} power cuts in history {100 + seed}")
    assert not problems, "\n".join(problems[:40])


def test_kills_of_the_real_server() -> None:
    """Twenty of the thousand that `python -m tests.faults.kills` runs."""
    problems, counts = kills.many(20, 5000)
    assert not problems, "\n".join(problems)
    assert {"REGISTER", "STOREBATCH", "DROP", "COMMIT", "SAVE", "SET", "DEL", "EXPIRE", "FLUSHALL"} <= set(counts)
