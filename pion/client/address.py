"""Where the server is and who we are."""

from __future__ import annotations

import ssl as tls
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pion.errors import ArgumentError
from pion.limits import DEFAULT_PORT

__all__ = ["Address"]

_PLAIN: Final = ("pion", "redis")
_TLS: Final = ("pions", "rediss")
_UNIX: Final = ("pion+unix", "unix")


@dataclass(frozen=True, slots=True)
class Address:
    """One server, and how to talk to it.

    Attributes:
        host, port: the server on TCP.
        path: path of a Unix socket, instead of host and port.
        username, password: credentials; a password alone logs in the default user.
        ssl: None for plain text, else the context of TLS.
        db: database number of the ordinary keyspace.
        protocol: 3, which falls back to 2 at an old server, or 2.
        timeout: seconds without progress after which a call fails; None waits forever.
        connect_timeout: seconds for connecting, the TLS handshake and the login.
        client_name: name shown by CLIENT LIST.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl: tls.SSLContext | None = field(default=None, repr=False)
    db: int = 0
    protocol: int = 3
    timeout: float | None = 60.0
    connect_timeout: float = 10.0
    client_name: str | None = None

    def __post_init__(self) -> None:
        if self.protocol not in (2, 3):
            raise ValueError(f"protocol must be 2 or 3, not {self.protocol!r}")
        if self.username is not None and self.password is None:
            raise ValueError("a username needs a password")
        for what in ("username", "password", "client_name"):
            if (text := getattr(self, what)) is not None:
                _sendable(text, what)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    @classmethod
    def of(
        cls,
        url: str | None = None,
        *,
        ssl: bool | tls.SSLContext | None = None,
        ssl_ca: str | None = None,
        ssl_cert: str | None = None,
        ssl_key: str | None = None,
        **options: Any,
    ) -> Address:
        """An address from a URL and options; an option given wins over the URL.

        Args:
            url: ``pion://[[user]:password@]host[:port][/db]`` (or ``redis://``), ``pions://`` (or ``rediss://``) for
                TLS, ``pion+unix:///path`` (or ``unix://``), each with ``?timeout=…&protocol=…&client_name=…``.
                Reserved characters in the credentials are percent-encoded.
            ssl: True for TLS with the system's certificate authorities, or a context of your own.
            ssl_ca: file with the certificate authority to trust instead.
            ssl_cert, ssl_key: files with the client's certificate and key.
            options: the attributes of this class.

        Raises:
            ValueError: a malformed URL or options that exclude each other (TLS on a Unix socket).
        """
        found = _parse(url) if url is not None else {}
        by_scheme = found.pop("ssl", False)
        secure = by_scheme if ssl is None else ssl
        found.update({name: value for name, value in options.items() if value is not None or name == "timeout"})
        context = secure if isinstance(secure, tls.SSLContext) else None
        if context is None and (secure or ssl_ca or ssl_cert):
            context = tls.create_default_context(cafile=ssl_ca)
            if ssl_cert:
                context.load_cert_chain(ssl_cert, ssl_key)
        elif context is not None and (ssl_ca or ssl_cert):
            raise ValueError("give either your own SSL context or certificate files")
        if context is not None and found.get("path"):
            raise ValueError("a Unix socket needs no TLS")
        return replace(cls(), **found, ssl=context)


def _sendable(text: str, what: str) -> None:
    """Refuse what has no UTF-8, without saying what it is: it may be a secret."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the {what} has no UTF-8: a lone surrogate at position {error.start}") from None


def url_of(url: str) -> str:
    """A URL as it may be shown: without credentials and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _parse(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    found: dict[str, Any] = {}
    if parts.scheme in _UNIX:
        found["path"] = unquote(parts.path)
        if not found["path"] or parts.hostname:
            raise ValueError(f"a {parts.scheme} URL is {parts.scheme}:///path/of/the/socket")
    elif parts.scheme in _PLAIN or parts.scheme in _TLS:
        if not parts.hostname:
            raise ValueError(f"the {parts.scheme} URL names no host")
        found["host"] = parts.hostname
        try:
            found["port"] = parts.port or DEFAULT_PORT
        except ValueError as error:
            raise ValueError(f"{url_of(url)}: {error}") from None
        found["ssl"] = parts.scheme in _TLS
        if db := parts.path.strip("/"):
            found["db"] = _number("database", db, int)
    else:
        raise ValueError(f"unknown scheme {parts.scheme!r} (want {', '.join(_PLAIN + _TLS + _UNIX)})")
    if parts.password is not None:
        found["password"] = unquote(parts.password)
    if parts.username:
        found["username"] = unquote(parts.username)
    readers = {"timeout": float, "connect_timeout": float, "protocol": int, "db": int, "client_name": str}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in readers:
            raise ValueError(f"unknown URL option {name!r} (want {', '.join(readers)})")
        found[name] = _number(name, value, readers[name])
    return found


def _number(name: str, text: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"the URL's {name} is not a number: {text!r}") from None
