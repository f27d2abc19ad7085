"""Peer programs and packages of the compatibility tests.

A peer that is missing skips its test, unless PION_REQUIRE_PEERS=1 says that this machine was set up to have them all:
then the test fails, so that a gap in the set-up cannot hide behind a skip.
"""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Fail or skip the running test because `what` is not on this machine."""
    if os.environ.get("PION_REQUIRE_PEERS") == "1":
        pytest.fail(f"{what} is missing and PION_REQUIRE_PEERS=1")
    pytest.skip(f"{what} is not installed")


def program(name: str) -> str:
    """The path of an installed program."""
    path = shutil.which(name)
    return path if path is not None else missing(name)


def package(name: str) -> ModuleType:
    """An importable package."""
    try:
        return importlib.import_module(name)
    except ImportError:
        missing(f"the Python package {name}")
