"""Fixtures shared by every test."""

from hypothesis import settings

# How long one example takes says more about the machine than about the code; pytest-timeout bounds the whole.
settings.register_profile("pion", deadline=None)
settings.load_profile("pion")
