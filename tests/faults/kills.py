"""Long random histories against the real server, which is killed at a random moment and started again.

    python -m tests.faults.kills [HISTORIES] [FIRST_SEED]

Each history has its own directory, its own flush policy and rows short enough for one write or long enough to be
streamed. Now and then the next start is killed too, somewhere in its course.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.harness import Played, model_of
from tests.faults.history import FORMATS, NAMESPACES, ROWS, Step, random_history
from tests.support.process import Process
from tests.support.raw import Closed, Raw, ReplyError

LENGTH = 60
SHORT_ROW, LONG_ROW = 48, 16_384  # 12 rows of the longer one are streamed


def snapshot(conn: Raw) -> dict[str, Any]:
    """What a server has, in the shape of the model: prefixes by row, keys by value."""
    prefixes = {}
    for ns in map(bytes.decode, NAMESPACES):
        hit = conn.ok("KV.PREFIX.LOOKUP", ns) == "HIT"
        info = conn.call("V.INFO", f"{ns}_pk")
        if isinstance(info, ReplyError):
            assert str(info) == "ERR session not found", info
            assert not hit
            prefixes[ns] = None
            continue
        fields = dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)
        rows = {}
        for side, sid in enumerate((f"{ns}_pk", f"{ns}_pv")):
            for row in range(ROWS):
                body = conn.call("V.FETCH", sid, 0, "RANGE", row, row + 1)
                if isinstance(body, bytes) and body:
                    rows[f"{side}.0.{row}"] = body.hex()
                else:
                    assert body in (None, b"") or "rows" in str(body), body
        prefixes[ns] = {"fmt": FORMATS[fields["v_format"]], "hit": hit, "rows": rows}
    keys = {}
    for key in conn.ok("KEYS", "*"):
        keys[key.decode()] = [conn.ok("GET", key).hex(), conn.ok("TTL", key) > 0]
    return {"prefixes": prefixes, "keys": keys}


def _play_until_killed(process: Process, steps: list[Step], rng: random.Random) -> Played:
    """Some steps one after the other; then one is sent, and the server killed before, during or after it."""
    played = Played(opened=True)
    last = rng.randrange(len(steps))
    with Raw(process.port) as conn:
        for step in steps[:last]:
            conn.send(step.frame)
            played.acked.append(not isinstance(conn.read(), ReplyError))
        frame = steps[last].frame
        conn.send(frame[: rng.choice([len(frame), len(frame), rng.randrange(len(frame))])])
        time.sleep(rng.choice([0, 0, rng.random() * 0.003]))
        os.kill(process.pid, signal.SIGKILL)
        try:
            reply = conn.read()
        except (Closed, OSError):
            pass
        else:
            played.acked.append(not isinstance(reply, ReplyError))
    process.kill()
    return played


def _kill_a_start(directory: Path, flags: list[str], rng: random.Random) -> None:
    command = [sys.executable, "-m", "pion.cli", "--port", "0", "--kvcache", "--dir", str(directory), *flags]
    starting = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(rng.uniform(0.1, 0.5))
    starting.kill()
    starting.wait()


def one(seed: int, root: Path) -> tuple[list[str], Counter[str]]:
    """One history: what was wrong after it, and what it consisted of."""
    rng = random.Random(seed)
    flags = ["--appendfsync", rng.choice(["always", "everysec", "no"])]
    steps = random_history(seed, LENGTH, rng.choice([SHORT_ROW, SHORT_ROW, LONG_ROW]))
    process = Process(root, *flags)
    process.start()
    played = _play_until_killed(process, steps, rng)
    counts = Counter(step.text.split(" ")[0] for step, acked in zip(steps, played.acked, strict=False) if acked)
    if rng.random() < 0.25:
        _kill_a_start(root, flags, rng)
        counts["killed starts"] += 1
    model, problems = model_of(steps, played), []
    found = []
    for _ in range(rng.choice([1, 1, 2])):  # what the first start finds, the second finds too
        with Process(root, *flags) as again, Raw(again.port) as conn:
            found.append(snapshot(conn))
    problems = [f"history {seed}: {problem}" for problem in model.problems(found[0], power_cut=False)]
    if found[0] != found[-1]:
        problems.append(f"history {seed}: a second start finds something else")
    return problems, counts


def many(histories: int, first: int) -> tuple[list[str], Counter[str]]:
    """Histories with consecutive seeds, each in a directory of its own that is removed when it was fine."""
    problems: list[str] = []
    counts: Counter[str] = Counter()
    for seed in range(first, first + histories):
        root = Path(tempfile.mkdtemp(prefix=f"pion-history-{seed}-"))
        wrong, steps = one(seed, root / "data")
        problems += wrong
        counts += steps
        if wrong:
            print("\n".join(wrong), f"\nkept: {root}", flush=True)
        else:
            shutil.rmtree(root)
    return problems, counts


def main() -> int:
    histories = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    problems, counts = many(histories, first)
    acked = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"{histories} histories, {len(problems)} violations; acknowledged: {acked}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
