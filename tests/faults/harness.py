"""Builds the shim and talks to a runner under it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import disk
from tests.faults.history import NAMESPACES, Model, Step

STOP, FAIL, SHORT, FULL = 1, 2, 3, 4
SHIM = Path(__file__).with_name("shim.c")
ROOT = Path(__file__).parents[2]


def build(folder: Path) -> Path:
    """Compile the shim."""
    target = folder / "shim.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, SHIM, "-lpthread", "-ldl"], check=True)
    return target


@dataclass
class Played:
    """How far a history came: for each step that ended, whether it was acknowledged; calls counted."""

    acked: list[bool] = field(default_factory=list)
    opened: bool = False
    count: int = -1
    killed: bool = False


class Runner:
    """One process under the shim; plays and reads, one job after the other."""

    def __init__(self, shim: Path) -> None:
        env = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.runner", str(shim)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT,
        )  # fmt: skip

    def _job(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the runner died"
        answer: dict[str, Any] = json.loads(line)
        if answer["code"] not in (0, -9):
            error = Path(job["dir"] + ".error")
            raise AssertionError(error.read_text() if error.exists() else f"exit code {answer['code']}")
        return answer

    def play(self, root: Path, steps: list[Step], **fault: Any) -> Played:
        """Play a history with one fault."""
        frames = [base64.b64encode(step.frame).decode() for step in steps]
        answer = self._job(do="play", dir=str(root), steps=frames, **fault)
        out = Played(killed=answer["killed"])
        for line in answer["lines"]:
            if "opened" in line:
                out.opened = True
            elif "refused" in line:
                continue
            elif "step" in line:
                reply = base64.b64decode(line["reply"])  # nothing at all when the connection was closed instead
                out.acked.append(bool(reply) and not reply.startswith(b"-"))
            else:
                out.count = line["count"]
        return out

    def read(self, root: Path, *, power_cut: bool = False) -> dict[str, Any]:
        """What a start finds. AssertionError when it fails."""
        names = [ns.decode() for ns in NAMESPACES]
        answer = self._job(do="read", dir=str(root), namespaces=names, power_cut=power_cut)
        found: dict[str, Any] = answer["lines"][-1]
        return found

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def model_of(steps: list[Step], played: Played) -> Model:
    """What may be there after a history that came this far."""
    model = Model()
    for step, acked in zip(steps, played.acked, strict=False):
        model.took(step, acked)
    if len(played.acked) < len(steps) and played.opened:
        model.took(steps[len(played.acked)], acked=False)
    return model


def check(runner: Runner, root: Path, model: Model, what: str, *, power_cut: bool = False) -> list[str]:
    """Start twice: what the first start finds must be possible, and the second must find the same."""
    first = runner.read(root, power_cut=power_cut)
    out = [f"{what}: {problem}" for problem in model.problems(first, power_cut=power_cut)]
    again = runner.read(root)
    for part in ("prefixes", "keys"):
        if first[part] != again[part]:
            out.append(f"{what}: a second start finds other {part}: {first[part]} then {again[part]}"[:600])
    return out


def power_cuts(runner: Runner, folder: Path, steps: list[Step], calls: list[disk.Call], played: Played) -> list[str]:
    """Cut the power behind every call, in three ways each."""
    state, problems, ended = disk.Disk(), [], -1
    cut = folder / "cut"
    for number, call in enumerate(calls):
        if call.op == disk.MARK:
            ended = call.offset - 1  # steps up to this one have been acknowledged
            continue
        state.play(call)
        model = model_of(steps, Played(played.acked[: ended + 1], ended >= -1))
        for variant in range(3):
            shutil.rmtree(cut, ignore_errors=True)
            state.after_power_cut(cut, variant, number * 3 + variant)
            problems += check(
                runner, cut, model, f"power cut {variant} after call {number} ({call.op} {call.path})", power_cut=True
            )
    return problems
