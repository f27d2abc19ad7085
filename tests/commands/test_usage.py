"""Usage lines become the argument trees of COMMAND DOCS."""

from __future__ import annotations

import re

import pytest

import pion.commands
from pion import limits
from pion.commands import kv, table, usage

assert pion.commands


def test_every_line_is_a_command_and_parses() -> None:
    known = {record.name: record for record in table.walk()}
    for name, text in usage.lines().items():
        assert name in known, name
        usage.arguments(text)


def test_every_command_with_keys_has_a_line() -> None:
    lines = usage.lines()
    for record in table.walk():
        if record.first:
            kinds = [node["type"] for node in usage.arguments(lines[record.name])]
            assert "key" in kinds or "block" in kinds, record.name


def test_every_command_that_takes_arguments_has_a_line() -> None:
    lines = usage.lines()
    bare = {"kv.prefix.commit", "kv.prefix.flush", "quit", "debug"}  # DEBUG has none that anybody should use
    several = {record.name for record in table.walk() if record.arity < 0 and not record.subcommands}
    assert several - set(lines) == bare


def test_every_format_that_is_accepted_is_offered() -> None:
    offered = set(re.findall(r"[a-z0-9]+", kv.ACCEPTED_FORMATS)) - {"want", "or"}
    assert offered == set(limits.BUILT_FORMATS)


def test_set() -> None:
    key, value, condition, get, expiry = usage.arguments(usage.lines()["set"])
    assert key == {"name": "key", "type": "key"}
    assert value == {"name": "value", "type": "string"}
    assert condition["type"] == "oneof"
    assert condition["flags"] == ["optional"]
    assert condition["arguments"][1] == {"name": "xx", "type": "pure-token", "token": "XX"}
    assert get == {"name": "get", "type": "pure-token", "token": "GET", "flags": ["optional"]}
    assert expiry["arguments"][0] == {"name": "seconds", "type": "integer", "token": "EX"}


def test_blocks_and_repetition() -> None:
    assert usage.arguments("key (field value)...")[1] == {
        "name": "field",
        "type": "block",
        "arguments": [{"name": "field", "type": "string"}, {"name": "value", "type": "string"}],
        "flags": ["multiple"],
    }
    limit = usage.arguments("[LIMIT offset count]")[0]
    assert (limit["type"], limit["token"], limit["flags"]) == ("block", "LIMIT", ["optional"])
    assert [node["name"] for node in limit["arguments"]] == ["offset", "count"]


@pytest.mark.parametrize("text", ["key ]", "[key", "(a | b"])
def test_broken_lines_are_refused(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        usage.arguments(text)
