"""What someone does who has just installed the wheel. Run by test_wheel.py with an empty environment's Python.

Nothing but the wheel and what it requires is importable here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

READY = "Ready to accept connections on "


def program(name: str) -> str:
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    assert path is not None, f"{name} was not installed"
    return path


@contextlib.contextmanager
def server(folder: Path) -> Iterator[int]:
    """A server on a free port; the port comes from the line that says it is ready."""
    command = [program("pion-server"), "--port", "0", "--dir", str(folder), "--kvcache"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if READY in line:
                    yield int(line.rsplit(":", 1)[1])
                    break
            else:
                raise AssertionError(f"the server ended with {process.wait()} before it was ready")
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    assert process.returncode == 0, process.returncode


def main() -> None:
    import pion
    import pion._core

    home = Path(pion.__file__).parent
    assert Path(sys.prefix) in home.parents, f"{home} is not the installed package"
    modules = [module.name for module in pkgutil.iter_modules(pion._core.__path__) if not module.name.startswith("_")]
    assert len(modules) >= 8, modules
    for name in modules:
        importlib.import_module(f"pion._core.{name}")
        assert (home / "_core" / f"{name}.pxd").is_file()
        assert (home / "_core" / f"{name}.pyi").is_file()
    assert (Path(pion._core.get_include()) / "quant.h").is_file()
    assert importlib.util.find_spec("pytest") is None, "the environment is not empty"

    version = subprocess.run([program("pion-server"), "--version"], capture_output=True, text=True, check=True).stdout
    assert pion.__version__ in version, version
    assert "--kvcache" in subprocess.run([program("pion-server"), "--help"], capture_output=True, text=True).stdout

    import numpy as np

    k = np.arange(2 * 3 * 5 * 16, dtype=np.float16).reshape(2, 3, 5, 16)  # layers, heads, tokens, head_dim
    v = -k
    with tempfile.TemporaryDirectory() as name:
        for turn in range(2):  # stored by the first server, fetched from the second
            with server(Path(name)) as port, pion.Client(host="127.0.0.1", port=port) as client:
                assert client.ping()
                if turn == 0:
                    client.store("smoke", k, v)
                    client.call("SET", "greeting", "hello")
                got = client.fetch("smoke")
                assert np.array_equal(got.k, k)
                assert np.array_equal(got.v, v)
                assert client.call("GET", "greeting") == b"hello"
    print("smoke test passed")


if __name__ == "__main__":
    main()
