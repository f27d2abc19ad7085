"""The golden bytes of V, KV.PREFIX, SSM and PION, in RESP2 and RESP3: the real server, and memory connections."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import kv_attend, kv_prefix, kv_receipt, kv_v, kv_vfetch
from tests.golden.kit import PING, PONG, Golden, cmd, matches
from tests.support.door import Door
from tests.support.process import Process

CASES = [golden for module in (kv_v, kv_vfetch, kv_prefix, kv_receipt, kv_attend) for golden in module.CASES]
SHARED = [golden for golden in CASES if not golden.fresh and not golden.flags]
ALONE = [golden for golden in CASES if golden.fresh or golden.flags]


@pytest.fixture(scope="module", params=[(2,), (3,), (2, "--memory-only")], ids=["resp2", "resp3", "memory"])
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Process, int]]:
    """A server of its own for each protocol: the second run must not see what the first left."""
    proto, *flags = request.param
    with tempfile.TemporaryDirectory() as directory, Process(Path(directory) / "data", *flags) as process:
        yield process, proto


def _exchange(sock: socket.socket, request: bytes) -> bytes:
    """Sends the request and a PING; returns all that came before the PONG."""
    sock.sendall(request + PING)
    got = bytearray()
    while not got.endswith(PONG):
        piece = sock.recv(1 << 16)
        if not piece:
            raise AssertionError(f"the connection was closed after {bytes(got[:500])!r}")
        got += piece
    return bytes(got[: -len(PONG)])


def play(port: int, golden: Golden, proto: int) -> None:
    """Runs the steps of one case on a new connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        if proto == 3:
            assert _exchange(sock, cmd("HELLO 3")).startswith(b"%")
        for step in golden.steps:
            got = _exchange(sock, step.request)
            want = step.resp3 if proto == 3 else step.resp2
            assert matches(want, got), f"wire §{golden.section}: {step.request[:200]!r}\n got {got!r}\nwant {want!r}"


@pytest.mark.parametrize("golden", SHARED, ids=lambda golden: golden.name)
def test_golden(shared: tuple[Process, int], golden: Golden) -> None:
    process, proto = shared
    play(process.port, golden, proto)


@pytest.mark.parametrize("proto", [2, 3])
@pytest.mark.parametrize("golden", ALONE, ids=lambda golden: golden.name)
def test_golden_on_a_fresh_server(tmp_path: Path, golden: Golden, proto: int) -> None:
    with Process(tmp_path / "data", *golden.flags) as process:
        play(process.port, golden, proto)


def _memory_door(golden: Golden, directory: Path, proto: int, stream_min: int | None) -> Door:
    """The server options of a case, for a server in this process."""
    flags = list(golden.flags)
    options: dict[str, Any] = {"kvcache": "-kvcache" not in flags, "wal": "--no-wal" not in flags}
    if "--ns-prefix" in flags:
        options["ns_prefix"] = flags[flags.index("--ns-prefix") + 1]
    told: dict[str, Any] = {"attention": "off"} if "off" in flags else {}
    if "--attend-warm-slots" in flags:
        told["attend_warm_slots"] = int(flags[flags.index("--attend-warm-slots") + 1])
    options["told"] = told
    return Door(proto, directory=directory, stream_min=stream_min, **options)


@pytest.mark.parametrize("stream_min", [None, 1], ids=["whole", "streamed"])
@pytest.mark.parametrize("proto", [2, 3])
@pytest.mark.parametrize("golden", CASES, ids=lambda golden: golden.name)
def test_golden_over_a_memory_connection(tmp_path: Path, golden: Golden, proto: int, stream_min: int | None) -> None:
    """Once with bodies collected first, once with every body, of a single byte too, going straight to its file."""
    with _memory_door(golden, tmp_path / "data", proto, stream_min) as door:
        for step in golden.steps:
            parts = [step.request] if stream_min is None else [step.request[:7], step.request[7:]]
            got = b"".join(door(part) for part in parts)
            want = step.resp3 if proto == 3 else step.resp2
            assert matches(want, got), f"wire §{golden.section}: {step.request[:200]!r}\n got {got!r}\nwant {want!r}"


def test_every_name_is_unique() -> None:
    names = [golden.name for golden in CASES]
    assert len(names) == len(set(names))


def test_every_command_has_golden_bytes() -> None:
    from pion.commands import table

    typed = b"".join(step.request for golden in CASES for step in golden.steps).upper()
    groups = ("vstore", "prefix", "state", "attention", "pion")
    ours = {record.name.upper() for record in table.COMMANDS.values() if record.group in groups}
    assert len(ours) >= 30
    assert not {name for name in ours if f"\r\n{name}\r\n".encode() not in typed}
