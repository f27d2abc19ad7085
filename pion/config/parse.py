"""From a command line, a configuration file and the environment to `Options`."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pion.config.options import (
    BY_FLAG,
    BY_NAME,
    FIELDS,
    FIXED,
    IDLE_FLAGS,
    LATER_FLAGS,
    Options,
    flag_of,
    parse_password,
)
from pion.errors import NOT_IN_VERSION, StartupError

_INDEPENDENT = (
    "--independent-workers: this server has one coherent keyspace whatever -w is; "
    "-w sets the threads that move bytes, so there are no private keyspaces to acknowledge"
)


class HelpRequested(Exception):
    """`--help` was given."""


class VersionRequested(Exception):
    """`--version` was given."""


def parse_args(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Options:
    """The options of a command line `[file] --name value ...`.

    Later flags win over earlier ones and over the file; `PION_REQUIREPASS` is used when no flag sets a password.

    Raises:
        StartupError: anything wrong; the text goes behind `FATAL: `.
        HelpRequested, VersionRequested: instead of options.
    """
    options = Options()
    words = list(argv)
    if words and not words[0].startswith("-"):
        _load_file(options, Path(words.pop(0)))
    i = 0
    while i < len(words):
        word, _, attached = words[i].partition("=")
        given = attached if "=" in words[i] else None
        i += 1
        if word in ("-h", "--help"):
            raise HelpRequested
        if word in ("-v", "--version"):
            raise VersionRequested
        if word in IDLE_FLAGS:
            continue
        field = BY_FLAG.get(word)
        if field is None:
            raise _unknown(word)
        if field.metadata["switch"] is not None:
            if given is not None:
                raise StartupError(f"invalid value for {word}: the flag takes none")
            setattr(options, field.name, field.metadata["switch"])
            continue
        if given is None:
            if i == len(words):
                raise StartupError(f"flag requires a value: {word}")
            given = words[i]
            i += 1
        _assign(options, field, given, word)
    return _check(options, os.environ if env is None else env)


def _assign(options: Options, field: dataclasses.Field[Any], text: str, shown: str) -> None:
    try:
        setattr(options, field.name, field.metadata["parse"](text))
    except ValueError as error:
        message = str(error)
        if message in ("invalid port", "invalid worker count"):
            raise StartupError(f"{message}: {text}") from None
        raise StartupError(f"invalid value for {shown}: {text} ({message})") from None


def _unknown(word: str) -> StartupError:
    if not word.startswith("-"):
        return StartupError(f"unexpected argument: {word}")
    if word == "--independent-workers":
        return StartupError(_INDEPENDENT)
    if word in LATER_FLAGS:
        return StartupError(f"{word} is {NOT_IN_VERSION}")
    near = nearest(word, [*BY_FLAG, *LATER_FLAGS, *IDLE_FLAGS, "--help", "--version", "--independent-workers"])
    return StartupError(f"unknown flag '{word}'" + (f" (did you mean {near}?)" if near else ""))


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word with the smallest edit distance, if that is at most max(2, a third of the length)."""
    distance, best = min((_distance(word, other), other) for other in known if other.startswith("--"))
    return best if distance <= max(2, len(word) // 3) else None


def _distance(a: str, b: str) -> int:
    """Levenshtein's edit distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


# --- files ---------------------------------------------------------------------------------------------------------


def _load_file(options: Options, path: Path) -> None:
    """Reads redis.conf lines, or TOML when the name ends in `.toml`."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror}") from None
    if path.suffix == ".toml":
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise StartupError(f"{path}: {error}") from None
        for name, value in table.items():
            words = [str(word) for word in value] if isinstance(value, list) else [_toml_text(value)]
            _directive(options, name, words, str(path))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        try:
            name, *words = shlex.split(line)
        except ValueError:
            raise StartupError(f"{path}:{number}: unbalanced quotes") from None
        _directive(options, name, words, f"{path}:{number}")


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _directive(options: Options, name: str, words: list[str], where: str) -> None:
    name = name.lower().replace("_", "-")
    fixed = FIXED.get(name)
    if fixed is not None:
        if " ".join(words).lower() != fixed.lower():
            raise StartupError(f"{where}: '{name} {' '.join(words)}' is {NOT_IN_VERSION} (only '{fixed}')")
        return
    field = BY_NAME.get(name)
    if field is None:
        near = nearest("--" + name, ["--" + known for known in (*BY_NAME, *FIXED)])
        hint = f" (did you mean {near[2:]}?)" if near else ""
        raise StartupError(f"{where}: unknown directive '{name}'{hint}")
    if not words:
        raise StartupError(f"{where}: '{name}' requires a value")
    _assign(options, field, " ".join(words), f"'{name}' ({where})")


# --- checks across options -------------------------------------------------------------------------------------------


def _check(options: Options, env: Mapping[str, str]) -> Options:
    if options.requirepass_file:
        options.requirepass = _read_password(Path(options.requirepass_file))
    if not options.requirepass and env.get("PION_REQUIREPASS"):
        try:
            options.requirepass = parse_password(env["PION_REQUIREPASS"])
        except ValueError as error:
            raise StartupError(f"PION_REQUIREPASS: {error}") from None
    if options.memory_only and options.dir:
        raise StartupError("--memory-only keeps nothing on disk: drop --dir")
    if options.attention == "off" and (options.metal_attention or options.metal_attention_fp16):
        raise StartupError("--attention off contradicts --metal-attention: drop one of them")
    lane = options.binary_port if options.binary_port is not None else -1
    if lane >= 0 and not options.kvcache:
        raise StartupError("--binary-port needs --kvcache: the binary lane serves queries of stored prefixes")
    if lane > 0 and lane == options.port:
        raise StartupError(f"--binary-port {lane} is the port of RESP: choose another one, or drop it for {lane + 1}")
    if options.port < 0 and not options.unixsocket:
        raise StartupError("nothing to listen on: --port -1 needs --unixsocket")
    if not options.dir and not options.memory_only:
        options.dir = f"./pion-{max(options.port, 0)}"
    exposed = [address for address in options.bind if not ipaddress.ip_address(address).is_loopback]
    if exposed and max(options.port, lane) >= 0 and not options.requirepass and not options.insecure_no_auth:
        raise StartupError(
            f"--bind {exposed[0]} without a password would open every prefix to the network: "
            "set --requirepass-file, or say --insecure-no-auth"
        )
    return options


def _read_password(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise StartupError(f"cannot read --requirepass-file {path}: {error.strerror}") from None
    password = text.split("\n", 1)[0].rstrip("\r")
    if not password:
        raise StartupError(f"--requirepass-file {path} is empty. An empty password file would silently disable auth.")
    try:
        return parse_password(password)
    except ValueError as error:
        raise StartupError(f"--requirepass-file {path}: {error}") from None


def help_text() -> str:
    """What `--help` prints: groups, one line a flag."""
    lines = ["usage: pion-server [redis.conf | config.toml] [flags]", ""]
    groups: dict[str, list[str]] = {}
    for field in FIELDS.values():
        meta, flag = field.metadata, flag_of(field)
        if flag is None:
            continue
        left = (f"-{meta['short']}, " if meta["short"] else "") + flag
        left += "" if meta["switch"] is not None else f" {meta['metavar']}"
        default = "" if meta["switch"] is not None or field.default in ("", None) else f" ({_shown(field.default)})"
        groups.setdefault(meta["group"], []).append(f"  {left:<38} {meta['text']}{default}")
    groups["Diagnostics"] += [f"  {'-v, --version':<38} print the version", f"  {'-h, --help':<38} print this text"]
    for group, rows in groups.items():
        lines += [f"{group}:", *rows, ""]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
