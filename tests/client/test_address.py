"""URL forms and the options beside them."""

import ssl
from typing import Any

import pytest

from pion.client.address import Address

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("pion://", {}),
    ("pion://h", {"host": "h", "port": 1974}),
    ("pion://h:7", {"host": "h", "port": 7}),
    ("redis://h:6379/3", {"host": "h", "port": 6379, "db": 3}),
    ("pion://user:p%40ss%3A@h", {"host": "h", "username": "user", "password": "p@ss:"}),
    ("redis://:secret@h", {"host": "h", "username": None, "password": "secret"}),
    ("pion://[::1]:9", {"host": "::1", "port": 9}),
    ("unix:///tmp/a%20b.sock", {"path": "/tmp/a b.sock"}),
    ("pion+unix:///tmp/s?db=2", {"path": "/tmp/s", "db": 2}),
    (
        "pion://h?timeout=1.5&connect_timeout=2&protocol=2&client_name=me",
        {"host": "h", "timeout": 1.5, "connect_timeout": 2.0, "protocol": 2, "client_name": "me"},
    ),
]


@pytest.mark.parametrize(("url", "expected"), GOOD[1:])
def test_urls(url: str, expected: dict[str, Any]) -> None:
    assert Address.of(url) == Address(**expected)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "unknown scheme 'http'"),
        ("pion://", "names no host"),
        ("h:1974", "unknown scheme"),
        ("pion://h/x", "database is not a number"),
        ("pion://h?speed=9", "unknown URL option 'speed'"),
        ("pion://h?timeout=soon", "timeout is not a number"),
        ("pion://h?protocol=4", "protocol must be 2 or 3"),
        ("pion://user@h", "a username needs a password"),
        ("unix://host/path", "unix:///path"),
        ("unix://", "unix:///path"),
    ],
)
def test_malformed_urls_say_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Address.of(url)


def test_options_win_over_the_url_and_timeout_can_be_switched_off() -> None:
    address = Address.of("pion://h:1/2?timeout=5", port=9, timeout=None, password="x")
    assert (address.host, address.port, address.db, address.timeout, address.password) == ("h", 9, 2, None, "x")


def test_tls_by_scheme_flag_or_context() -> None:
    assert Address.of("pion://h").ssl is None
    for address in (Address.of("pions://h"), Address.of("rediss://h"), Address.of("pion://h", ssl=True)):
        assert address.ssl is not None
        assert address.ssl.verify_mode == ssl.CERT_REQUIRED
        assert address.ssl.check_hostname
    mine = ssl.create_default_context()
    assert Address.of("pion://h", ssl=mine).ssl is mine
    assert Address.of("pions://h", ssl=False).ssl is None
    with pytest.raises(ValueError, match="either your own SSL context or"):
        Address.of("pion://h", ssl=mine, ssl_ca="ca.pem")
    with pytest.raises(ValueError, match="needs no TLS"):
        Address.of("unix:///s", ssl=True)


def test_secrets_stay_out_of_the_repr() -> None:
    assert "secret" not in repr(Address.of("pion://u:secret@h"))
