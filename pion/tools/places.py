"""Where prefixes are: a running server, or a data directory that no server holds. Both offer the same methods."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final, Protocol

from pion import limits
from pion.client.errors import PrefixMissError
from pion.client.portable import Arrays
from pion.client.sync import Client
from pion.errors import CommandError, StartupError
from pion.store.engine import Engine

__all__ = ["Directory", "Place", "Server", "add_options", "place_of"]

_SIDES: Final = (b"_pk", b"_pv")
_WORDS: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_NO_CAP: Final = 1 << 62  # a tool evicts nothing; the server's caps hold from its next start on


class Place(Protocol):
    """A store of prefixes."""

    def why(self, ns: bytes) -> str:
        """What KV.PREFIX.WHY says."""
        ...

    def info(self, ns: bytes) -> list[dict[str, str]]:
        """The lines of V.INFO of K and of V, by name. Raises PrefixMissError."""
        ...

    def manifest(self, ns: bytes) -> bytes | None:
        """Its state 0, where the client for mlx-lm says what it consists of."""
        ...

    def answer(self, ns: bytes, side: int, layer: int, rows: int) -> bytes:
        """All rows of a layer, as the answer to FMT RAW. Raises CommandError."""
        ...

    def store(self, ns: bytes, arrays: Arrays, formats: tuple[str, str], said: dict[str, Any]) -> None:
        """Register a prefix and store its rows, K and V in these formats; see `pion.Client.store`."""
        ...

    def commit(self) -> None:
        """Make everything durable."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Server:
    """A running server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def why(self, ns: bytes) -> str:
        """See `Place`."""
        return bytes(self._client.call("KV.PREFIX.WHY", ns)).decode("utf-8", "replace")

    def info(self, ns: bytes) -> list[dict[str, str]]:
        """See `Place`."""
        try:
            texts = [self._client.call("V.INFO", ns + side).decode() for side in _SIDES]
        except CommandError as error:
            if "session not found" in str(error):
                raise PrefixMissError(self.why(ns)) from None
            raise
        return [dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line) for text in texts]

    def manifest(self, ns: bytes) -> bytes | None:
        """See `Place`."""
        found = self._client.call("SSM.PREFIX.FETCH", ns, 0)
        return None if found is None else bytes(found)

    def answer(self, ns: bytes, side: int, layer: int, rows: int) -> bytes:
        """See `Place`."""
        answer = self._client.call("V.FETCH", ns + _SIDES[side], layer, "RANGE", 0, rows, "FMT", "RAW")
        if answer is None:
            raise CommandError(f"ERR layer {layer} of {'KV'[side]} has no rows")
        return bytes(answer)

    def store(self, ns: bytes, arrays: Arrays, formats: tuple[str, str], said: dict[str, Any]) -> None:
        """See `Place`."""
        dtype = "bfloat16" if arrays.dtype == "bfloat16" else None
        k_format, v_format = formats
        self._client.store(ns, arrays.k, arrays.v, k_format=k_format, v_format=v_format, dtype=dtype, **said)

    def commit(self) -> None:
        """See `Place`."""
        self._client.commit()

    def close(self) -> None:
        """See `Place`."""
        self._client.close()


class Directory:
    """A data directory that no server holds.

    Raises:
        StartupError: a server holds it, or it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        # The keyspace is of no interest, so its log is left alone.
        from pion._core.keyspace import Keyspace

        self._engine = Engine(
            path, max_sessions=1 << 24, max_bytes=_NO_CAP, keyspace=Keyspace(limits.DATABASES), ticker=False
        )

    def why(self, ns: bytes) -> str:
        """See `Place`."""
        return self._engine.why(ns)

    def info(self, ns: bytes) -> list[dict[str, str]]:
        """See `Place`."""
        from pion.commands.vcommands import session_lines

        try:
            found = [session_lines(self._engine.v_info(ns + side)) for side in _SIDES]
        except CommandError:
            raise PrefixMissError(self.why(ns)) from None
        return [dict(line.split(":", 1) for line in lines) for lines in found]

    def manifest(self, ns: bytes) -> bytes | None:
        """See `Place`."""
        found = self._engine.ssm_fetch(ns, 0)
        return None if found is None else found.tobytes()

    def answer(self, ns: bytes, side: int, layer: int, rows: int) -> bytes:
        """See `Place`."""
        from pion.commands.vcommands import as_stored

        found = as_stored(self._engine.v_fetch_stored(ns + _SIDES[side], layer, 0, rows))
        if found is None:
            raise CommandError(f"ERR layer {layer} of {'KV'[side]} has no rows")
        return found.tobytes()

    def store(self, ns: bytes, arrays: Arrays, formats: tuple[str, str], said: dict[str, Any]) -> None:
        """See `Place`."""
        from pion.client.formats import check_name, stored_format
        from pion.client.tensors import rows_of

        for name in formats:
            check_name("format", name)
        heads, rows, head_dim = arrays.k[0].shape
        dim, layers = heads * head_dim, len(arrays.k)
        k, v = (limits.FORMATS[stored_format(name, arrays.dtype)] for name in formats)
        said |= {"rows": rows, "heads": heads, "head_dim": head_dim}
        engine = self._engine
        if k == v:
            engine.register(ns, dim, k, layers=layers, **said)
        else:
            engine.register_schema(ns, [(dim, k)] * layers, [(dim, v)] * layers, **said)
        try:
            for layer, sides in enumerate(zip(arrays.k, arrays.v, strict=True)):
                for side, array in zip(_SIDES, sides, strict=True):
                    data = rows_of(array).data.cast("B")
                    engine.v_store(ns + side, layer, 0, rows, data, _WORDS[arrays.dtype])
        except CommandError:
            if not engine.why(ns).startswith("hit"):  # leave nothing that nobody can use
                engine.drop(ns)
            raise

    def commit(self) -> None:
        """See `Place`."""
        self._engine.commit()

    def close(self) -> None:
        """See `Place`."""
        self._engine.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where."""
    group = parser.add_argument_group("where", "a running server, or with --dir a data directory that no server holds")
    group.add_argument("--url", help="pion://[[user]:password@]host[:port] and the like, instead of the next options")
    group.add_argument("--host", help="the server (default 127.0.0.1); a path names a Unix socket")
    group.add_argument("--port", type=int, help=f"its port (default {limits.DEFAULT_PORT})")
    group.add_argument("--username", metavar="NAME", help="login name (default: $PION_USERNAME)")
    group.add_argument("--password", metavar="PW", help="password, visible in ps (default: $PION_PASSWORD)")
    group.add_argument("--password-file", metavar="PATH", type=Path, help="file that holds the password")
    group.add_argument("--dir", metavar="PATH", type=Path, help="data directory")


def place_of(args: argparse.Namespace, *, make: bool = False) -> Place:
    """What the options of `add_options` name.

    Args:
        make: whether a data directory that is not there is made.

    Raises:
        ValueError: options that exclude each other.
        StartupError: the directory is not there, or in use.
    """
    network = ("url", "host", "port", "username", "password", "password_file")
    if args.dir is not None:
        given = [name for name in network if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--dir and --{given[0].replace('_', '-')} exclude each other")
        if not make and not is_data_directory(args.dir):
            raise StartupError(f"{args.dir} is no data directory")
        return Directory(args.dir)
    if args.password is not None and args.password_file is not None:
        raise ValueError("--password and --password-file exclude each other")
    password = args.password
    if args.password_file is not None:
        password = args.password_file.read_text(encoding="utf-8").rstrip("\r\n")
    username = args.username
    if password is None and args.url is None:
        password = os.environ.get("PION_PASSWORD")
        username = username or (os.environ.get("PION_USERNAME") if password is not None else None)
    unix = args.host is not None and args.host.startswith("/")
    where = {"path": args.host} if unix else {"host": args.host, "port": args.port}
    return Server(Client(args.url, **where, username=username, password=password))


def is_data_directory(path: Path) -> bool:
    """Whether a server has ever used a directory."""
    return (path / "kv").is_dir()
