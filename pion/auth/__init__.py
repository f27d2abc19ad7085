"""Who may do what: one `User` object per login, checked by the dispatcher."""

from pion.auth.users import Authenticator, User

__all__ = ["Authenticator", "User"]
