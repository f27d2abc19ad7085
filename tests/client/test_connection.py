"""Calls, pipelines, timeouts and reconnects of the threaded client."""

import contextlib
import os
import signal
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from pion.client.errors import CallTimeoutError, ConnectionLostError
from pion.client.sync import Client
from pion.errors import AuthenticationError, CommandError, MismatchError
from pion.wire.resp import LocalProtocolError


@pytest.fixture
def server(byte_server: Any) -> Any:
    return byte_server()


@pytest.fixture
def client(server: Any) -> Any:
    with Client(f"pion://127.0.0.1:{server.port}", timeout=20) as client:
        yield client


def test_calls_and_pipelines(client: Client, server: Any) -> None:
    assert client.ping()
    assert client.call("SET", "k", b"v") == "OK"
    assert client.call("GET", "k") == b"v"
    assert client.call("GET", "none") is None
    assert client.pipeline(["ECHO", str(i)] for i in range(5000)) == [b"%d" % i for i in range(5000)]
    assert client.pipeline([]) == []
    assert server.accepted == 1
    assert server.seen[:2] == [[b"HELLO", b"3"], [b"CLIENT", b"SETINFO", b"LIB-NAME", b"pion"]]


def test_error_replies_become_exceptions_by_their_code(client: Client, server: Any, answers: Any) -> None:
    server.answer = lambda peer, argv: answers["error"](argv[1]) if argv[0] == b"E" else answers["ordinary"](peer, argv)
    for text, kind in [("ERR x", CommandError), ("MISMATCH digest", MismatchError), ("NOAUTH no", AuthenticationError)]:
        with pytest.raises(kind) as info:
            client.call("E", text)
        assert str(info.value).startswith(text)
        assert info.value.code == text.split()[0]
    with pytest.raises(CommandError, match="ERR first"):
        client.pipeline([["PING"], ["E", "ERR first"], ["E", "ERR second"]])
    replies = client.pipeline([["PING"], ["E", "MISMATCH m"], ["PING"]], raise_on_error=False)
    assert replies[0] == replies[2] == "PONG"
    assert isinstance(replies[1], MismatchError)
    assert server.accepted == 1  # a refusal does not cost the connection


def test_large_values_are_received_into_out(client: Client) -> None:
    value = os.urandom(3_000_000)
    client.call("SET", "k", value)
    out = bytearray(len(value))
    assert client.call("GET", "k", out=[out]) is out
    assert out == value
    assert client.call("GET", "k") == value
    small = bytearray(5)
    assert client.call("GET", "k", out=[small]) == value
    assert small == bytes(5)


def test_a12_large_pipelines_both_ways_complete(byte_server: Any) -> None:
    # The peer reads nothing while its reply cannot leave, and all socket buffers are small.
    server = byte_server(rcvbuf=65536)
    server.data[b"big"] = os.urandom(8 << 20)
    blob = os.urandom(16 << 20)
    with Client(host="127.0.0.1", port=server.port, timeout=30) as client:
        replies = client.pipeline([["GET", "big"], ["SET", "b", blob], ["GET", "b"], ["SET", "c", blob], ["PING"]])
    assert replies == [server.data[b"big"], "OK", blob, "OK", "PONG"]


def test_a13_a_call_that_timed_out_never_answers_the_next_one(client: Client, server: Any, answers: Any) -> None:
    release = threading.Event()

    def slow(peer: Any, argv: list[bytes]) -> Any:
        if argv == [b"GET", b"foo"]:
            release.wait(20)
            return b"foo's value"
        return answers["ordinary"](peer, argv)

    server.answer = slow
    server.data[b"bar"] = b"bar's value"
    with Client(host="127.0.0.1", port=server.port, timeout=0.05) as impatient:
        with pytest.raises(CallTimeoutError, match=r"nothing moved for 0.05 s"):
            impatient.call("GET", "foo")
        with pytest.raises(CallTimeoutError):
            impatient.pipeline([["GET", "bar"], ["GET", "foo"], ["PING"]])
        assert impatient.call("GET", "bar") == b"bar's value"
    release.set()
    assert client.call("GET", "bar") == b"bar's value"


def test_a13_the_pool_opens_a_new_connection_after_a_timeout(server: Any, answers: Any) -> None:
    server.answer = lambda peer, argv: (
        answers["silence"] if argv == [b"GET", b"foo"] else answers["ordinary"](peer, argv)
    )
    server.data[b"bar"] = b"b"
    with Client(host="127.0.0.1", port=server.port, timeout=0.2, max_connections=1) as client:
        assert client.ping()
        with pytest.raises(CallTimeoutError):
            client.call("GET", "foo")
        assert client.call("GET", "bar") == b"b"
        assert client.ping()
    assert server.accepted == 2


def test_an_interrupted_call_closes_its_connection(client: Client, server: Any) -> None:
    def commands() -> Any:
        yield ["SET", "a", bytes(2 << 20)]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.pipeline(commands())
    assert client.call("ECHO", "x") == b"x"
    assert server.accepted == 2


def test_a_wrong_argument_is_our_own_error(client: Client) -> None:
    with pytest.raises(LocalProtocolError, match="an argument cannot be None"):
        client.call("SET", "k", None)  # type: ignore[arg-type]
    assert client.ping()


def test_a_server_that_hangs_up_or_talks_nonsense(client: Client, server: Any, answers: Any) -> None:
    def answer(peer: Any, argv: list[bytes]) -> Any:
        if argv[0] == b"BYE":
            return answers["hang up"]
        if argv[0] == b"NONSENSE":
            return answers["raw"](b"HTTP/1.1 400 Bad Request\r\n")
        if argv[0] == b"TWICE":
            return answers["raw"](b"+one\r\n+two\r\n")
        return answers["ordinary"](peer, argv)

    server.answer = answer
    with pytest.raises(ConnectionLostError, match="closed the connection"):
        client.pipeline([["PING"], ["BYE"], ["PING"]])
    with pytest.raises(ConnectionLostError, match="not a reply"):
        client.call("NONSENSE")
    with pytest.raises(ConnectionLostError, match="nobody asked for"):
        client.call("TWICE")
    assert client.call("ECHO", "fine") == b"fine"


def test_reconnects_after_the_server_went_away(client: Client, server: Any) -> None:
    for _ in range(3):
        assert client.ping()
        server.drop_connections()
        server.socks[-1].close()
    assert client.ping()
    assert server.accepted == 4


def test_a_server_that_is_down_and_a_closed_client() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = Client(host="127.0.0.1", port=port)
    with pytest.raises(ConnectionLostError, match="cannot connect") as info:
        client.ping()
    assert isinstance(info.value, ConnectionError)
    client.close()
    with pytest.raises(ConnectionLostError, match="client is closed"):
        client.ping()


def test_threads_share_a_client(server: Any) -> None:
    failures: list[object] = []
    with Client(host="127.0.0.1", port=server.port, max_connections=3, timeout=20) as client:

        def work(me: int) -> None:
            for i in range(100):
                text = f"{me}-{i}"
                if client.call("ECHO", text) != text.encode():
                    failures.append(text)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert failures == []
    assert server.accepted <= 3


def test_a_busy_pool_is_an_error_after_the_timeout(server: Any, answers: Any) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(peer: Any, argv: list[bytes]) -> Any:
        if argv == [b"ECHO", b"slow"]:
            entered.set()
            release.wait(20)
        return answers["ordinary"](peer, argv)

    server.answer = slow
    with Client(host="127.0.0.1", port=server.port, max_connections=1, timeout=1) as client:

        def hold() -> None:
            with contextlib.suppress(CallTimeoutError):
                client.call("ECHO", "slow")

        thread = threading.Thread(target=hold)
        thread.start()
        assert entered.wait(10)
        client._pool.address = replace(client.address, timeout=0.05)
        with pytest.raises(CallTimeoutError, match=r"all 1 connections to .* stayed busy"):
            client.ping()
        release.set()
        thread.join(10)
        assert client.ping()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_connections_alone(client: Client, server: Any) -> None:
    assert client.call("SET", "who", "parent") == "OK"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            code = 0 if client.call("GET", "who") == b"parent" and client.call("SET", "who", "child") == "OK" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.call("GET", "who") == b"child"
    assert server.accepted == 2


def test_login_falls_back_to_resp2_at_an_old_server(server: Any, answers: Any) -> None:
    def old(peer: Any, argv: list[bytes]) -> Any:
        if argv[0] in (b"HELLO", b"CLIENT"):
            return answers["error"](f"ERR unknown command '{argv[0].decode()}'")
        return answers["ordinary"](peer, argv)

    server.answer = old
    with Client(f"redis://:pw@127.0.0.1:{server.port}/2") as client:
        assert client.call("GET", "nothing") is None
    assert [b"AUTH", b"pw"] in server.seen
    assert [b"SELECT", b"2"] in server.seen
    with (
        Client(f"redis://me:pw@127.0.0.1:{server.port}?protocol=2&client_name=n") as client,
        pytest.raises(CommandError),
    ):
        client.ping()  # SETNAME was refused, and that was asked for
    assert server.seen[-3] == [b"AUTH", b"me", b"pw"]


def test_login_with_wrong_or_missing_credentials(server: Any, answers: Any) -> None:
    def guarded(peer: Any, argv: list[bytes]) -> Any:
        if argv[0] == b"HELLO" and argv[2:] != [b"AUTH", b"default", b"right"]:
            return answers["error"]("WRONGPASS invalid username-password pair" if argv[2:] else "NOAUTH HELLO must be")
        return answers["ordinary"](peer, argv)

    server.answer = guarded
    for url in ("pion://:wrong@127.0.0.1", "pion://127.0.0.1"):
        with Client(url, port=server.port) as client, pytest.raises(AuthenticationError):
            client.ping()
    with Client("pion://:right@127.0.0.1", port=server.port) as client:
        assert client.ping()


def test_unix_socket(byte_server: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "pion.sock")
    byte_server(path=path)
    with Client(f"unix://{path}") as client:
        assert client.ping()
    with Client(path=str(tmp_path / "no.sock")) as client, pytest.raises(ConnectionLostError, match=r"no\.sock"):
        client.ping()


def test_tls_round_trips_both_ways_and_certificate_checks(byte_server: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = byte_server(context=context)
    blob = os.urandom(3 << 20)
    with Client(f"pions://127.0.0.1:{server.port}", ssl_ca=str(tmp_path / "ca.pem"), timeout=30) as client:
        assert client.ping()
        assert client.pipeline([["SET", "k", blob], ["GET", "k"], ["GET", "k"]]) == ["OK", blob, blob]
    with Client(f"pions://127.0.0.1:{server.port}") as client, pytest.raises(ssl.SSLCertVerificationError):
        client.ping()
