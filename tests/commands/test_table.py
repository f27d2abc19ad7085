"""The command table: what it refuses at import and what it tells about commands."""

from __future__ import annotations

import pytest

import pion.commands
from pion.commands import table
from pion.errors import CommandError

assert pion.commands


def test_every_record_is_documented() -> None:
    for record in table.walk():
        assert record.summary.endswith("."), record.name
        assert record.complexity, record.name
        assert record.name == record.name.lower()
        assert (record.first == 0) == (record.keys == ""), record.name
        assert not {"write", "readonly"} <= record.flags, record.name


def test_key_positions() -> None:
    def keys(*words: bytes) -> list[bytes]:
        argv = list(words)
        return [argv[i] for i in table.find(argv).key_positions(len(argv))]

    assert keys(b"GET", b"k") == [b"k"]
    assert keys(b"mset", b"a", b"1", b"b", b"2") == [b"a", b"b"]
    assert keys(b"DEL", b"a", b"b", b"c") == [b"a", b"b", b"c"]
    assert keys(b"RENAME", b"a", b"b") == [b"a", b"b"]
    assert keys(b"PING") == []
    assert keys(b"MEMORY", b"USAGE", b"k") == [b"k"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([b"nope"], "ERR unknown command 'nope', with args beginning with: "),
        ([b"no\0pe", b"a\r\nb"], "ERR unknown command 'no', with args beginning with: 'a  b' "),
        ([b"x", b"y" * 200], f"ERR unknown command 'x', with args beginning with: '{'y' * 128}' "),
        (
            [b"x", b"y" * 100, b"z" * 100, b"w"],
            f"ERR unknown command 'x', with args beginning with: '{'y' * 100}' '{'z' * 25}' ",
        ),
        ([b"client", b"nope"], "ERR unknown subcommand 'nope'. Try CLIENT HELP."),
        ([b"client", b"kill"], "ERR wrong number of arguments for 'client|kill' command"),
        ([b"GET"], "ERR wrong number of arguments for 'get' command"),
    ],
)
def test_refusals(argv: list[bytes], text: str) -> None:
    with pytest.raises(CommandError) as caught:
        table.find(argv)
    assert str(caught.value) == text


def test_registration_is_checked() -> None:
    register = table.command("GET", 2, "readonly", 1, 1, 1, "string", "1.0.0", "Again.", "O(1)")
    with pytest.raises(ValueError, match="twice"):
        register(lambda ctx, argv: None)
    register = table.command("NEW", 2, "readnly", 1, 1, 1, "string", "1.0.0", "Typo.", "O(1)")
    with pytest.raises(ValueError, match="readnly"):
        register(lambda ctx, argv: None)


def test_help_lists_subcommands() -> None:
    lines = table.help_lines(table.COMMANDS[b"slowlog"])
    assert lines[0].startswith("SLOWLOG <subcommand>")
    assert {"GET", "LEN", "RESET", "HELP"} <= set(lines)
