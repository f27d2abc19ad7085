"""Users and passwords.

In this version there is one user, `default`, with every command and no key prefix. Connections hold the `User` object
itself: a changed password or a removed user is one attribute, not a walk over names.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from pion import errors
from pion.errors import AuthenticationError, CommandError


@dataclass(eq=False, slots=True)
class User:
    """One login.

    Attributes:
        digest: SHA-256 of the password; None = any password is right (no password is configured).
        key_prefix: put before every key this user names; empty for an administrator.
    """

    name: str
    digest: bytes | None = field(default=None, repr=False)
    enabled: bool = True
    key_prefix: bytes = b""

    def accepts(self, password: bytes) -> bool:
        """Compares digests of equal length in constant time, so that timing tells nothing about the password."""
        given = hashlib.sha256(password).digest()
        if self.digest is None:
            return self.enabled
        return hmac.compare_digest(given, self.digest) and self.enabled


class Authenticator:
    """Knows the users and answers AUTH and HELLO ... AUTH."""

    def __init__(self, password: str | bytes | None = None) -> None:
        self.default = User("default")
        self._users = {b"default": self.default}
        self._nobody = User("", hashlib.sha256(b"").digest(), enabled=False)
        self.set_password(password)

    @property
    def open(self) -> bool:
        """True when connections need no login."""
        return self.default.digest is None

    def set_password(self, password: str | bytes | None) -> None:
        """Sets the default user's password; None or empty removes it."""
        if isinstance(password, str):
            password = password.encode("utf-8", "surrogateescape")
        self.default.digest = hashlib.sha256(password).digest() if password else None

    def login(self, password: bytes, username: bytes | None = None) -> User:
        """The user for these credentials.

        Raises:
            CommandError: a lone password although none is configured.
            AuthenticationError: WRONGPASS. An unknown name takes as long as a wrong password.
        """
        if username is None:
            if self.open:
                raise CommandError(errors.AUTH_NO_PASSWORD)
            username = b"default"
        user = self._users.get(bytes(username), self._nobody)
        if not user.accepts(bytes(password)):
            raise AuthenticationError(errors.WRONGPASS)
        return user
