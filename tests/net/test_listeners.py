"""Listening sockets and the descriptor limit."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path

import pytest

from pion.errors import StartupError
from pion.net.listeners import address_text, open_tcp, open_unix, raise_descriptor_limit


def test_one_port_for_all_addresses():
    sockets = open_tcp(["127.0.0.1", "127.0.0.2"], 0)
    try:
        names = [sock.getsockname() for sock in sockets]
        assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"]
        assert names[0][1] == names[1][1] != 0
        with pytest.raises(StartupError, match=rf"cannot bind port {names[0][1]} \(already in use\?\)"):
            open_tcp(["127.0.0.2"], names[0][1])
    finally:
        for sock in sockets:
            sock.close()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:\d+: Cannot assign"):
        open_tcp(["127.0.0.1", "192.0.2.1"], 0)


def test_a_stale_unix_socket_is_replaced_a_live_one_and_a_file_are_not(tmp_path: Path):
    path = tmp_path / "sock"
    first = open_unix(str(path), 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StartupError, match="another server listens"):
        open_unix(str(path), 0o600)
    first.close()
    second = open_unix(str(path), 0o660)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    second.close()
    plain = tmp_path / "file"
    plain.write_text("keep me")
    with pytest.raises(StartupError, match="not a socket"):
        open_unix(str(plain), 0o600)
    assert plain.read_text() == "keep me"
    with pytest.raises(StartupError, match="cannot listen"):
        open_unix(str(tmp_path / "no" / "such" / "folder"), 0o600)


def test_the_descriptor_limit_rises_to_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        assert raise_descriptor_limit(low + 10) == low + 10
        assert raise_descriptor_limit(low) == low + 10  # never lowered
        assert raise_descriptor_limit(1 << 40) <= hard or hard == resource.RLIM_INFINITY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("127.0.0.1", 80), "127.0.0.1:80"),
        (("::1", 80, 0, 0), "[::1]:80"),
        ("/tmp/s", "/tmp/s"),
        (b"/tmp/s", "/tmp/s"),
        (os.fsencode("/tmp/é"), "/tmp/é"),
    ],
)
def test_address_text(address: object, text: str):
    assert address_text(address) == text


def test_ipv6_and_ipv4_share_a_port():
    try:
        sockets = open_tcp(["127.0.0.1", "::1"], 0)
    except StartupError:
        pytest.skip("no IPv6 here")
    assert {sock.family for sock in sockets} == {socket.AF_INET, socket.AF_INET6}
    for sock in sockets:
        sock.close()
