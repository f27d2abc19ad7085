"""Command line, configuration files, environment and CONFIG names of the one option table."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion.cli import banner, main, server_main
from pion.config import FIELDS, HelpRequested, Options, VersionRequested, help_text, parse_args, parse_size
from pion.config.options import FIXED, LATER_FLAGS
from pion.errors import StartupError


def refused(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        parse_args(argv, env or {})
    return str(caught.value)


def test_defaults() -> None:
    options = parse_args([], {})
    assert (options.port, options.bind, options.dir, options.wal) == (1974, ("127.0.0.1",), "./pion-1974", True)
    assert not options.kvcache
    assert options.max_sessions == 65_536


def test_flags() -> None:
    options = parse_args(
        ["-p", "0", "-w", "4", "--kvcache", "--no-wal", "--maxmemory", "2gb", "--appendfsync=always", "--bind",
         "127.0.0.1,::1", "--max-bytes", "10g", "--ns-prefix", "team|", "--profile", "kv", "--dir", "/x"],
        {},
    )  # fmt: skip
    assert (options.port, options.workers, options.kvcache, options.wal) == (0, 4, True, False)
    assert (options.maxmemory, options.max_bytes, options.appendfsync) == (2 << 30, 10 * 10**9, "always")
    assert (options.bind, options.ns_prefix, options.dir) == (("127.0.0.1", "::1"), "team|", "/x")


def test_later_flags_win() -> None:
    assert parse_args(["-p", "1", "--port", "2"], {}).port == 2


def test_flags_of_the_original_that_are_idle() -> None:
    assert parse_args(["--no-auto-detect", "--no-auto-embed", "--no-crash-log"], {}) == parse_args([], {})


@pytest.mark.parametrize("flag", sorted(LATER_FLAGS))
def test_flags_of_later_versions(flag: str) -> None:
    assert refused(flag, "x") == f"{flag} is not in this version"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--prot", "1"], "unknown flag '--prot' (did you mean --port?)"),
        (["--kvcach"], "unknown flag '--kvcach' (did you mean --kvcache?)"),
        (["--zzzzzzzz"], "unknown flag '--zzzzzzzz'"),
        (["-q"], "unknown flag '-q'"),
        (["-p"], "flag requires a value: -p"),
        (["--kvcache", "yes"], "unexpected argument: yes"),
        (["--kvcache=yes"], "invalid value for --kvcache: the flag takes none"),
        (["-p", "70000"], "invalid port: 70000"),
        (["-p", "x"], "invalid port: x"),
        (["-w", "0"], "invalid worker count: 0"),
        (["--maxmemory", "x"], "invalid value for --maxmemory: x (argument must be a memory value)"),
        (["--profile", "foo"], "invalid --profile (expected kv|vector|ai|full): foo"),
        (["--profile", "ai"], "--profile ai is not in this version: vector search and AI commands come later"),
        (["--bind", "nowhere"], "--bind 'nowhere' is not a valid IP address."),
        (["--memory-only", "--dir", "x"], "--memory-only keeps nothing on disk: drop --dir"),
        (["--port", "-1"], "nothing to listen on: --port -1 needs --unixsocket"),
        (["--binary-port", "1975"], "--binary-port needs --kvcache: the binary lane serves queries of stored prefixes"),
        (
            ["--kvcache", "--binary-port", "1974"],
            "--binary-port 1974 is the port of RESP: choose another one, or drop it for 1975",
        ),
        (
            ["--kvcache", "--binary-port", "x"],
            "invalid value for --binary-port: x (argument must be a port, 0 for any free one, or off)",
        ),
    ],
)
def test_refused(argv: list[str], text: str) -> None:
    assert refused(*argv) == text


def test_independent_workers_are_refused_with_the_reason() -> None:
    assert "one coherent keyspace" in refused("--independent-workers")


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "::", "192.0.2.1", "127.0.0.1,192.0.2.1"])
def test_open_to_the_network_needs_a_password(address: str) -> None:
    assert "without a password" in refused("--bind", address)
    assert parse_args(["--bind", address, "--requirepass", "pw"], {}).requirepass == "pw"
    assert parse_args(["--bind", address, "--insecure-no-auth"], {}).requirepass == ""


def test_password_file(tmp_path: Path) -> None:
    path = tmp_path / "pw"
    path.write_text("s3cret\n")
    assert parse_args(["--requirepass-file", str(path)], {}).requirepass == "s3cret"
    path.write_text("\n")
    assert "An empty password file would silently disable auth." in refused("--requirepass-file", str(path))
    path.write_text("x" * 512)
    assert "too long" in refused("--requirepass-file", str(path))
    assert "cannot read" in refused("--requirepass-file", str(tmp_path / "none"))


def test_password_from_the_environment_is_the_last_resort() -> None:
    env = {"PION_REQUIREPASS": "env"}
    assert parse_args([], env).requirepass == "env"
    assert parse_args(["--requirepass", "flag"], env).requirepass == "flag"
    assert "too long" in refused(env={"PION_REQUIREPASS": "x" * 512})


def test_redis_conf(tmp_path: Path) -> None:
    path = tmp_path / "redis.conf"
    path.write_text(
        '# a comment\nport 7000\nbind 127.0.0.1 ::1\nrequirepass "a b"\nmaxmemory 100mb\nappendonly no\nsave ""\n'
        "maxclients 50\nmaxmemory-policy Volatile-TTL\ndir /data\nkvcache yes\nmax-sessions 256\n"
    )
    options = parse_args([str(path), "--port", "7001"], {})
    assert (options.port, options.bind, options.requirepass) == (7001, ("127.0.0.1", "::1"), "a b")
    assert (options.maxmemory, options.appendonly, options.maxclients) == (100 << 20, False, 50)
    assert (options.dir, options.kvcache, options.max_sessions) == ("/data", True, 256)
    assert options.maxmemory_policy == "volatile-ttl"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("maxmemry 1", "unknown directive 'maxmemry' (did you mean maxmemory?)"),
        ("save 900 1", "'save 900 1' is not in this version (only '')"),
        (
            "maxmemory-policy allkeys-lfu",
            "argument(s) must be one of the following: noeviction, allkeys-lru, volatile-lru, volatile-ttl",
        ),
        ('requirepass "open', "unbalanced quotes"),
        ("port", "'port' requires a value"),
        ("port x", "invalid port: x"),
        ("appendonly maybe", "argument must be 'yes' or 'no'"),
    ],
)
def test_redis_conf_refused(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "redis.conf"
    path.write_text(line + "\n")
    assert text in refused(str(path))


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "pion.toml"
    path.write_text('port = 7000\nkvcache = true\nbind = ["127.0.0.1", "::1"]\nmaxmemory = "1gb"\nmax_sessions = 5\n')
    options = parse_args([str(path)], {})
    assert (options.port, options.kvcache, options.maxmemory, options.max_sessions) == (7000, True, 1 << 30, 5)
    assert options.bind == ("127.0.0.1", "::1")
    path.write_text("port = [")
    assert str(path) in refused(str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [("100", 100), ("1k", 1000), ("1kb", 1024), ("1MB", 1 << 20), ("2g", 2 * 10**9), ("1GB", 1 << 30)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


def test_percentages() -> None:
    assert 0 < parse_size("50%", percent=True) < parse_size("100%", percent=True)
    with pytest.raises(ValueError, match="memory value"):
        parse_size("50%")


def test_help_and_version() -> None:
    with pytest.raises(HelpRequested):
        parse_args(["--help"], {})
    with pytest.raises(VersionRequested):
        parse_args(["-p", "1", "-v"], {})
    text = help_text()
    for flag in ("--port", "--kvcache", "--no-wal", "--requirepass-file", "--insecure-no-auth", "--version", "--help"):
        assert text.count(flag) >= 1
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("argv", "mode"),
    [
        ([], "off"),
        (["--kvcache"], "auto"),
        (["--metal-attention"], "auto"),
        (["--metal-attention-fp16"], "auto"),
        (["--kvcache", "--attention", "off"], "off"),
        (["--attention", "cpu", "--metal-attention"], "cpu"),
        (["--attention", "MLX"], "mlx"),
    ],
)
def test_attention_follows_from_the_other_flags(argv: list[str], mode: str) -> None:
    assert parse_args(argv, {}).attention_mode == mode


def test_flags_of_attention() -> None:
    options = parse_args(
        ["--fa-window", "128", "--attend-warm-slots", "3", "--attend-cold-slots", "0", "--attend-max-bytes", "1gb",
         "--attend-autowarm"],
        {},
    )  # fmt: skip
    assert (options.fa_window, options.attend_warm_slots, options.attend_cold_slots) == (128, 3, 0)
    assert (options.attend_max_bytes, options.attend_autowarm) == (1 << 30, True)
    assert "must be one of the following: auto, metal, mlx, cpu, off" in refused("--attention", "cuda")
    assert "contradicts" in refused("--attention", "off", "--metal-attention")
    assert "--attend-warm-slots: 0" in refused("--attend-warm-slots", "0")


@pytest.mark.parametrize(
    ("argv", "port", "text"),
    [
        ([], None, ""),
        (["--binary-port", "off"], -1, "off"),
        (["--kvcache", "--binary-port", "0"], 0, "0"),
        (["--kvcache", "--binary-port=4000"], 4000, "4000"),
        (["--port", "0", "--kvcache", "--binary-port", "0"], 0, "0"),
    ],
)
def test_the_port_of_the_binary_lane(argv: list[str], port: int | None, text: str) -> None:
    options = parse_args(argv, {})
    assert options.binary_port == port
    assert options.parameters()["binary-port"] == text


def test_a_binary_lane_alone_on_a_network_needs_a_password_too() -> None:
    argv = ["--port", "-1", "--unixsocket", "/x", "--bind", "0.0.0.0", "--kvcache", "--binary-port", "4000"]
    assert "without a password" in refused(*argv)
    assert parse_args([*argv, "--requirepass", "pw"], {}).binary_port == 4000


def test_config_names() -> None:
    parameters = Options(requirepass="secret").parameters()
    assert parameters["requirepass"] == "(hidden)"
    assert parameters["appendonly"] == "yes"
    assert parameters["bind"] == "127.0.0.1"
    assert len(parameters) == len(FIELDS) + len(FIXED)


def test_config_set() -> None:
    options = Options()
    assert options.parse_parameter("maxmemory", "1kb") == ("maxmemory", 1024)
    assert options.parse_parameter("maxmemory-policy", "ALLKEYS-LRU") == ("maxmemory_policy", "allkeys-lru")
    assert options.parse_parameter("appendonly", "yes") == ("", None)
    assert options.parse_parameter("save", "") == ("", None)
    refused = ("port", "1"), ("save", "900 1"), ("maxmemory", "x"), ("appendonly", "no"), ("maxmemory-policy", "random")
    for name, text in refused:
        with pytest.raises(ValueError):
            options.parse_parameter(name, text)
    with pytest.raises(KeyError):
        options.parse_parameter("nosuch", "1")


def test_fatal(capsys: pytest.CaptureFixture[str]) -> None:
    assert server_main(["--prot"]) == 1
    out = capsys.readouterr()
    assert out.err.startswith("FATAL: unknown flag '--prot' (did you mean --port?)\n")
    assert "--help" in out.err
    assert server_main(["--help"]) == 0
    assert server_main(["--version"]) == 0


def test_the_other_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert main(["nosuch"]) == 2
    assert main(["top"]) == 2
    assert "pion top is not in this version" in capsys.readouterr().err


def test_banner_says_what_is_in_force() -> None:
    text = banner(parse_args(["--memory-only", "--requirepass", "pw", "-p", "7000"], {}))
    assert "127.0.0.1:7000" in text
    assert "memory only" in text
    text += banner(parse_args(["--memory-only", "--kvcache", "--max-sessions", "20"], {}))
    assert "on, at most 10 prefixes (--max-sessions 20; K and V of a prefix count as two)" in text
    assert "pw" not in text.replace("password", "")
