"""Redis's own command-line programs against the server."""

from __future__ import annotations

import subprocess

import pytest

from pion.testing import Server
from tests.support.peers import program

pytestmark = pytest.mark.compat


def cli(server: Server, *arguments: str, stdin: str | None = None) -> str:
    command = [program("redis-cli"), "-h", server.host, "-p", str(server.port), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cli_sets_and_gets(server: Server) -> None:
    assert cli(server, "SET", "user:1", '{"name":"alice"}') == "OK\n"
    assert cli(server, "GET", "user:1") == '{"name":"alice"}\n'
    assert cli(server, "-3", "HGETALL", "absent") == "\n"


def test_cli_reads_a_script_of_commands(server: Server) -> None:
    out = cli(server, stdin="SET a 1\nINCR a\nGET a\nnonsense\n")
    assert out.splitlines()[:3] == ["OK", "2", "2"]
    assert "ERR unknown command 'nonsense'" in out


def test_cli_pipe_mode_loads_everything(server: Server) -> None:
    out = cli(server, "--pipe", stdin="".join(f"SET pipe:{n} 'a b {n}'\r\n" for n in range(1000)))
    assert "errors: 0, replies: 1000" in out
    assert cli(server, "GET", "pipe:999") == "a b 999\n"


def test_cli_scans_and_reports_big_keys(server: Server) -> None:
    cli(server, "SET", "big", "x" * 5000)
    cli(server, "HSET", "hash", "a", "1", "b", "2")
    assert "hash" in cli(server, "--scan", "--pattern", "ha*")
    out = cli(server, "--bigkeys")
    assert "Biggest string found" in out
    assert "5000 bytes" in out


def test_cli_asks_for_statistics(server: Server) -> None:
    out = cli(server, "INFO", "server")
    assert "redis_version:7." in out


def test_cli_help_comes_from_command_docs(server: Server) -> None:
    docs = cli(server, "COMMAND", "DOCS", "GET")
    assert "summary" in docs
    assert "kv.prefix.lookup" in cli(server, "COMMAND", "DOCS", "KV.PREFIX.LOOKUP").lower()


def test_cli_authenticates(guarded: Server) -> None:
    assert "NOAUTH" in cli(guarded, "GET", "a")
    assert cli(guarded, "-a", "correct horse", "--no-auth-warning", "SET", "a", "1") == "OK\n"


def test_benchmark_runs_its_usual_tests(server: Server) -> None:
    command = [
        program("redis-benchmark"),
        "-h",
        server.host,
        "-p",
        str(server.port),
        "-q",
        "-n",
        "2000",
        "-c",
        "20",
        "-P",
        "4",
        "-t",
        "ping,set,get,incr,hset,zadd,mset",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "requests per second" in done.stdout
    assert "rror" not in done.stdout + done.stderr
