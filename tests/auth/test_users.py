"""Logins."""

from __future__ import annotations

import pytest

from pion import errors
from pion.auth import Authenticator
from pion.errors import AuthenticationError, CommandError


def test_open_server() -> None:
    auth = Authenticator()
    assert auth.open
    assert auth.login(b"anything", b"default") is auth.default
    with pytest.raises(CommandError, match="without any password"):
        auth.login(b"anything")


def test_password() -> None:
    auth = Authenticator(b"correct horse")
    assert not auth.open
    assert auth.login(b"correct horse") is auth.default
    assert auth.login(b"correct horse", b"default") is auth.default
    for password, name in (
        (b"wrong", None),
        (b"", None),
        (b"correct horse", b"other"),
        (b"", b""),
        (b"correct hors", None),
    ):
        with pytest.raises(AuthenticationError) as caught:
            auth.login(password, name)
        assert str(caught.value) == errors.WRONGPASS


def test_disabled_user_is_refused() -> None:
    auth = Authenticator(b"pw")
    auth.default.enabled = False
    with pytest.raises(AuthenticationError):
        auth.login(b"pw")


def test_password_is_not_kept_or_shown() -> None:
    auth = Authenticator(b"correct horse")
    assert "correct horse" not in repr(auth.default)
    assert auth.default.digest is not None
    assert b"correct horse" not in auth.default.digest


def test_comparison_looks_at_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        seen.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    auth = Authenticator(b"pw")
    for password, name in ((b"p", None), (b"x" * 500, None), (b"pw", b"nobody")):
        with pytest.raises(AuthenticationError):
            auth.login(password, name)
    assert seen == [(32, 32)] * 3  # digests of one length, an unknown name included
