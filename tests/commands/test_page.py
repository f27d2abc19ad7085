"""docs/commands.md says what the table says, and what it says of FLUSHALL is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.process import Process
from tests.support.raw import Raw

ROOT = Path(__file__).parents[2]


def test_the_page_of_commands_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/list_commands.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_flushing_the_keyspace_keeps_prefixes_over_a_restart(tmp_path: Path) -> None:
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            conn.ok("KV.PREFIX.REGISTER", "kept", 8, "fp16")
            for command in ("FLUSHDB", "FLUSHALL"):
                conn.ok("SET", "key", "1")
                assert conn.ok(command) == "OK"
                assert conn.ok("EXISTS", "key") == 0
                assert conn.ok("KV.PREFIX.LOOKUP", "kept") == "HIT"
        process.restart()
        with Raw(process.port) as conn:
            assert conn.ok("KV.PREFIX.LOOKUP", "kept") == "HIT"
            conn.ok("KV.PREFIX.FLUSH")
            assert conn.ok("KV.PREFIX.LOOKUP", "kept") == "MISS"
