"""Every compiled module agrees with its .pxd and its .pyi, and says when it is older than its sources."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "pion" / "_core"
MODULES = sorted(path.stem for path in CORE.glob("*.pyx"))


def stub_names(tree: ast.Module) -> set[str]:
    """Public names that a stub defines, without its type aliases."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):  # "X as X" offers a name of another module
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
    return {name for name in names if not name.startswith("_")}


def declared_in_pxd(text: str) -> tuple[set[str], set[str]]:
    """(classes, functions) that a .pxd exports, without what it declares of C headers."""
    own = re.sub(r"(?m)^cdef extern from .*:\n(?:(?:[ \t]+.*)?\n)*", "", text)
    classes = set(re.findall(r"(?m)^cdef class (\w+)", own))
    functions = set(re.findall(r"(?m)^c(?:p?)def (?!class\b)[\w ]*?\*?\s*(\w+)\(", own))
    return classes, functions


@pytest.mark.parametrize("name", MODULES)
def test_stub_and_module_offer_the_same_names(name: str) -> None:
    module = importlib.import_module(f"pion._core.{name}")
    stub = stub_names(ast.parse((CORE / f"{name}.pyi").read_text()))
    assert stub == set(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)
    assert module.__doc__


@pytest.mark.parametrize("name", MODULES)
def test_stub_and_module_offer_the_same_methods(name: str) -> None:
    module = importlib.import_module(f"pion._core.{name}")
    tree = ast.parse((CORE / f"{name}.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            cls = getattr(module, node.name)
            stub = stub_names(ast.Module(node.body, [])) | {
                inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
            missing = {attribute for attribute in stub - {"__buffer__"} if not hasattr(cls, attribute)}
            # attributes that a Python class sets in __init__ are no class attributes
            assert not missing or "__dict__" in dir(cls), f"{node.name}: {missing}"


@pytest.mark.parametrize("name", MODULES)
def test_pxd_and_module_agree(name: str) -> None:
    module = importlib.import_module(f"pion._core.{name}")
    classes, functions = declared_in_pxd((CORE / f"{name}.pxd").read_text())
    assert {name for name in classes if not name.startswith("_")} <= set(module.__all__)
    exported = getattr(module, "__pyx_capi__", {})
    assert functions <= set(exported) | {"inline"}


def test_there_is_something_to_compare() -> None:
    assert {"quant", "membership", "resp", "framing", "keyspace", "plane", "stream", "vstore"} <= set(MODULES)


def test_a_changed_source_is_reported_at_import(tmp_path: Path) -> None:
    package = tmp_path / "pion"
    shutil.copytree(CORE, package / "_core", ignore=shutil.ignore_patterns("*.c", "__pycache__"))
    shutil.copy(ROOT / "pion" / "__init__.py", package)

    def warning(code: str = "import pion._core.quant") -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr

    assert warning() == ""
    header = package / "_core" / "quant.h"
    header.write_text(header.read_text() + "\n/* changed */\n")
    assert re.search(r"RuntimeWarning: pion\._core: .*quant.* built from other sources .*make build", warning())
    for built in (package / "_core").glob("quant.*.so"):
        built.unlink()
    assert "pion._core.quant is not compiled" in warning("from pion._core import quant")
