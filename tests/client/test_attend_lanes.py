"""The binary lane of the client: what it does where the lane is missing, refuses, breaks off or comes back.

The server of these tests is a byte server: it does what no healthy one does. The real one is in test_stage2.py.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import Client, PionPromptCache
from pion.client import attend_lanes
from pion.client.errors import AttendError, LaneError
from pion.wire import fastlane
from pion.wire.fastlane import Command, Status
from tests.support.process import Process

H_Q, H_KV, D, S, M = 4, 2, 8, 3, 2
Q = np.arange(H_Q * M * D, dtype=np.float32).reshape(H_Q, M, D)
SUF = np.ones((H_KV, S, D), np.float32)
HEADS = np.array([0, 0, 1, 1], np.uint8)
COLD = "COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)"


class Lane:
    """Answers each request with what `answer` gives: (status, body), bytes to send as they are, or None to hang up."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.seen: list[tuple[int, bytes]] = []
        self.accepted = 0
        self.answer: Callable[[int, bytes], Any] = self.usual
        self.socks: list[socket.socket] = []
        self.thread = threading.Thread(target=self._accept)
        self.thread.start()

    def usual(self, command: int, body: bytes) -> Any:
        """PING; AUTH with pw; twice the queries."""
        if command == Command.AUTH:
            return (Status.OK if body == b"pw" else Status.ERROR), b""
        if command == Command.PING:
            return Status.OK, b""
        call = fastlane.parse_fused(body)
        assert call is not None
        return Status.OK, (2 * np.frombuffer(call.q, "<f4")).tobytes()

    def _accept(self) -> None:
        threads = []
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                break
            self.accepted += 1
            self.socks.append(sock)
            threads.append(threading.Thread(target=self._serve, args=(sock,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, sock: socket.socket) -> None:
        requests = fastlane.Requests(1 << 24)
        with sock:
            while True:
                try:
                    data = sock.recv(1 << 16)
                except OSError:
                    return
                if not data:
                    return
                requests.feed(data)
                while len(requests) and (request := requests.next()) is not None:
                    self.seen.append((request.command, request.body))
                    answer = self.answer(request.command, request.body)
                    if answer is None:
                        return
                    sock.sendall(answer if isinstance(answer, bytes) else b"".join(fastlane.reply(*answer)))

    def cut(self) -> None:
        """Hang up on everybody."""
        for sock in self.socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        self.thread.join()


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane()
    yield lane
    lane.close()


@pytest.fixture
def resp(byte_server: Any, lane: Lane, answers: dict[str, Any]) -> Any:
    """Answers three times the queries, and says where the lane is."""
    server = byte_server()
    server.info = f"# Server\r\nbinary_port:{lane.port}\r\n"
    server.warm = answers["raw"](b"+2\r\n")
    server.fused = lambda q: (3 * np.frombuffer(q, "<f4")).tobytes()

    def answer(peer: Any, argv: list[bytes]) -> Any:
        if argv[0] == b"INFO":
            return server.info.encode()
        if argv[0] == b"KV.PREFIX.WARM":
            return server.warm
        if argv[0] == b"ATTEND.PREFIX.QUERY_FUSED":
            return server.fused(argv[7])
        return answers["ordinary"](peer, argv)

    server.answer = answer
    return server


def ask(client: Any) -> str:
    """Which lane answered."""
    out = client.attend_query_fused("doc", 3, Q, SUF, SUF + 1, HEADS, fa_window=5)
    return {2: "binary", 3: "resp"}[int(out[0, 0, 1])]


def commands(server: Any) -> list[bytes]:
    return [argv[0] for argv in server.seen if argv[0] not in (b"HELLO", b"CLIENT")]


def test_a_question_goes_over_the_lane_and_says_everything(resp: Any, lane: Lane) -> None:
    with Client(port=resp.port, password="pw") as client:
        out = client.attend_query_fused("doc", 3, Q, SUF, SUF + 1, HEADS, fa_window=5)
        np.testing.assert_array_equal(out, 2 * Q)
        assert ask(client) == "binary"
        assert lane.accepted == 1, "the connection is kept"
        assert commands(resp) == [b"INFO"], "asked once where it is"
        assert [command for command, _ in lane.seen] == [Command.AUTH, Command.PING] + 2 * [Command.QUERY_FUSED]
        call = fastlane.parse_fused(lane.seen[-1][1])
        assert call is not None
        assert (call.sid, call.layer, call.window, bytes(call.head_map)) == (b"doc_attn", 3, 5, HEADS.tobytes())
        assert (bytes(call.k_suf), bytes(call.v_suf)) == (SUF.tobytes(), (SUF + 1).tobytes())
        assert client._attend.described()["lanes"] == {"process": 0, "binary": 2, "resp": 0}


def test_sinks_go_over_resp(resp: Any, lane: Lane) -> None:
    with Client(port=resp.port) as client:
        client.attend_query_fused("doc", 3, Q, SUF, SUF, HEADS, sinks=np.ones(H_Q))
        assert lane.seen == []


def test_a_large_answer_goes_over_resp(resp: Any, lane: Lane) -> None:
    with Client(port=resp.port) as client:
        client.attend_query_fused("doc", 3, np.zeros((1, (4 << 20) // 32, 8)), SUF[:1], SUF[:1], None)
        assert [command for command, _ in lane.seen] == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("no port", "the server has none"),
        ("refused", "cannot connect"),
        ("hangs up", "closed the binary lane"),
        ("another protocol", "not the binary lane's protocol"),
        ("unknown status", "unknown status 9"),
        ("endless", "4294967295 bytes"),
        ("miss", "status 1 and 0 bytes"),
        ("error", "layer 3 of session b'doc_attn' was refused"),
        ("short", "status 0 and 4 bytes"),
        ("no ping", "PING was answered with status 2"),
    ],
)
def test_a_lane_that_fails_is_left_for_resp_and_tried_again(
    resp: Any, lane: Lane, what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(command: int, body: bytes) -> Any:
        if command == Command.PING and what != "no ping":
            return Status.OK, b""
        return {
            "hangs up": None, "another protocol": b"HTTP/1.1 400\r\n", "unknown status": b"\x5e\xca\x09\0\0\0\0",
            "endless": b"\x5e\xca\0\xff\xff\xff\xff", "miss": (Status.MISS, b""), "error": (Status.ERROR, b""),
            "short": (Status.OK, b"1234"), "no ping": (Status.ERROR, b""),
        }[what]  # fmt: skip

    right = resp.info
    if what in ("no port", "refused"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            resp.info = f"binary_port:{0 if what == 'no port' else free.getsockname()[1]}\r\n"
    else:
        lane.answer = wrong
    with PionPromptCache(port=resp.port) as pc:
        assert [ask(pc), ask(pc)] == ["resp", "resp"]
        tried = len(lane.seen)
        assert reason in pc.stats()["attend"]["binary_off"]
        assert ask(pc) == "resp"
        assert len(lane.seen) == tried, "it is left alone for a while"
        lane.answer, resp.info = lane.usual, right
        monkeypatch.setattr(pc._attend.binary, "_until", 0.0)  # the while is over
        assert ask(pc) == "binary"
        assert pc.stats()["attend"]["binary_off"] == ""
        assert pc.stats()["attend"]["lanes"] == {"process": 0, "binary": 1, "resp": 3}


def test_a_server_that_does_not_say_has_it_on_the_next_port(resp: Any, lane: Lane) -> None:
    resp.info = "redis_version:7.0.0\r\n"
    with Client(port=resp.port) as client:
        assert ask(client) == "resp"
        assert f":{resp.port + 1}:" in client._attend.described()["binary_off"]


def test_a_connection_that_was_cut_is_opened_again(resp: Any, lane: Lane) -> None:
    with Client(port=resp.port) as client:
        assert ask(client) == "binary"
        lane.cut()
        assert ask(client) == "binary"
        assert lane.accepted == 2


def test_a_refused_question_is_no_reason_to_leave_the_lane(resp: Any, lane: Lane, answers: dict[str, Any]) -> None:
    lane.answer = lambda command, body: (Status.OK if command == Command.PING else Status.ERROR, b"")
    resp.fused = lambda q: answers["error"]("ERR ATTEND.PREFIX.QUERY_FUSED failed (session not found)")
    with Client(port=resp.port) as client:
        with pytest.raises(AttendError, match="session not found"):
            ask(client)
        lane.answer = lane.usual
        assert ask(client) == "binary"


def test_a_cold_miss_is_warmed_over_resp_and_asked_again(resp: Any, lane: Lane, answers: dict[str, Any]) -> None:
    cold = [True]

    def once(command: int, body: bytes) -> Any:
        if command == Command.QUERY_FUSED and cold:
            cold.pop()
            return Status.COLDMISS, b""
        return lane.usual(command, body)

    lane.answer = once
    with PionPromptCache(port=resp.port) as pc:
        assert ask(pc) == "binary"
        assert pc.cold_rehydrates_observed == 1
        warm = next(argv for argv in resp.seen if argv[0] == b"KV.PREFIX.WARM")
        assert warm[1:] == [b"doc", b"2", b"8", b"doc_attn"], "the heads of K/V"
        lane.answer = lambda command, body: (Status.OK if command == Command.PING else Status.COLDMISS, b"")
        resp.fused = lambda q: answers["error"](COLD)
        with pytest.raises(RuntimeError, match="COLDMISS"):
            ask(pc)


def test_switches(resp: Any, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, want in (
        ("PION_PROMPT_CACHE_NO_BINARY", "1", "resp"), ("PION_PROMPT_CACHE_NO_BINARY", "0", "binary"),
        (attend_lanes.VARIABLE, "resp", "resp"), (attend_lanes.VARIABLE, "binary", "binary"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with Client(port=resp.port) as client:
                assert ask(client) == want, (variable, value)
    monkeypatch.setenv(attend_lanes.VARIABLE, "process")
    with Client(port=resp.port) as client, pytest.raises(LaneError, match="the server is not asked"):
        ask(client)
    monkeypatch.setenv(attend_lanes.VARIABLE, "binary")
    lane.answer = lambda command, body: None
    with Client(port=resp.port) as client, pytest.raises(LaneError, match=r"binary: .*closed the binary lane"):
        ask(client)
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_BINARY", "1")
    with pytest.raises(ValueError, match="NO_BINARY is set"):
        Client(port=resp.port)
    monkeypatch.setenv(attend_lanes.VARIABLE, "carrier pigeon")
    with pytest.raises(ValueError, match="want process, binary, resp"):
        Client(port=resp.port)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"path": "/tmp/x"}, "Unix socket"),
        ({"ssl": True}, "TLS"),
        ({"username": "u", "password": "p"}, "names of users"),
    ],
)
def test_where_the_lane_cannot_be(options: Any, why: str) -> None:
    with Client(**options) as client:
        assert why in client._attend.described()["binary_off"]


# --- the real server --------------------------------------------------------------------------------------------------


def test_the_servers_lane_is_found_and_answers_bit_for_bit_as_resp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a password; and again after the server was started anew, with its lane elsewhere."""
    k = np.random.default_rng(1).standard_normal((H_KV, 50, D)).astype(np.float32)
    with Process(tmp_path, "--requirepass", "pw") as process:
        answers = {}
        for round_ in range(2):
            for forced in ("", "resp"):
                monkeypatch.setenv(attend_lanes.VARIABLE, forced)
                with Client(port=process.port, password="pw") as client:
                    client.attend_store_layer("doc", 3, k, k)
                    answers[round_, forced] = client.attend_query_fused("doc", 3, Q, SUF, SUF, HEADS).tobytes()
                    assert client._attend.described()["lanes"][forced or "binary"] == 1
            process.restart()
        assert len(set(answers.values())) == 1


def test_a_server_without_the_lane_is_asked_over_resp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Process(tmp_path, "--binary-port", "off") as process, Client(port=process.port) as client:
        client.attend_store_layer("doc", 3, SUF, SUF)
        client.attend_query_fused("doc", 3, Q, SUF, SUF, HEADS)
        assert client._attend.described()["binary_off"] == "the server has none"
        assert client._attend.described()["lanes"] == {"process": 0, "binary": 0, "resp": 1}
