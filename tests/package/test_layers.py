"""The package's import rules hold, and the checker that says so notices what it should."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools" / "check_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_import_points_upward(layers: ModuleType) -> None:
    assert layers.check() == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("store/x.py", "from pion.net import server", "pion.store.x imports pion.net.server: store may use _core"),
        ("store/x.py", "def f():\n    import pion.commands.table", "imports pion.commands.table: store may use"),
        ("store/deep/x.py", "from ... import wire", "pion.store.deep.x imports pion.wire: store may use"),
        (
            "client/x.py",
            "from pion.store.engine import Engine",
            "client may use _core, errors, limits, metal_kernels, ref, wire",
        ),
        ("errors.py", "from pion import limits", "pion.errors imports pion.limits: errors may use nothing"),
        ("net/x.py", "from pion.cli import main", "imports pion.cli.main, which nothing may import"),
        ("store/x.py", "import trio", "imports trio, which lives in net, serve"),
        ("client/sync.py", "import trio", "imports trio, which lives in net, serve"),
        ("client/x.py", "import mlx.core as mx", "imports mlx at the top"),
        ("commands/x.py", "import numpy as np", "imports numpy at the top"),
        ("odd/x.py", "import os", "odd is no layer"),
    ],
)
def test_a_broken_rule_is_found(layers: ModuleType, tmp_path: Path, file: str, text: str, complaint: str) -> None:
    path = tmp_path / "pion" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = layers.check(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]
    assert found[0].startswith(f"pion/{file}")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("net/x.py", "import trio\nfrom pion.commands import table\nfrom pion.store import engine"),
        ("client/async_.py", "import trio"),
        ("client/x.py", "import numpy\ndef f():\n    import mlx.core"),
        ("store/x.py", "def f():\n    import numpy"),
        ("cli.py", "from pion.net import server\nfrom pion import demo"),
        ("store/x.py", "from .y import z\nfrom pion._core import quant\nfrom pion.errors import CommandError"),
    ],
)
def test_what_is_allowed_passes(layers: ModuleType, tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / "pion" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert layers.check(tmp_path) == []


def test_the_server_starts_without_numpy_and_mlx() -> None:
    code = (
        "import sys, pion.cli, pion.net.server, pion.commands, pion.store.engine\n"
        "print(sorted({'numpy', 'mlx', 'pytest', 'pion.client', 'pion.ref'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
