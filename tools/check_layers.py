"""Which part of the package may import which: the rules of ARCHITECTURE.md, read off the source files.

`python tools/check_layers.py` prints every import that breaks one and exits with 1. Imports inside functions and under
TYPE_CHECKING count too, but for the lazy names of `pion/__init__.py`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Each layer with the layers it may use, besides itself and everything those may use.
USES: dict[str, tuple[str, ...]] = {
    "errors": (),
    "limits": (),
    "config": ("errors", "limits"),
    "_core": ("errors", "limits"),
    "ref": ("_core",),  # for the value types its answers are compared in
    "wire": ("_core",),
    "metal_kernels": ("_core", "ref"),
    "attention": ("_core", "ref", "metal_kernels"),
    "store": ("_core",),
    "auth": ("errors",),
    "commands": ("store", "attention", "wire", "auth"),
    "net": ("commands", "wire", "auth", "config"),
    "client": ("wire", "metal_kernels"),
    "serve": ("client",),
}
# These stand above all others: they may use everything, and no layer may use them.
TOP = ("cli", "tools", "demo", "testing", "__main__")

# External packages that belong to some layers only. "inside" = in function bodies, anywhere.
TRIO = ("net", "serve", "client.async_", "client.async_pool", "testing", "cli")
LAZY = ("mlx", "mlx_lm")
NUMPY_FREE = ("errors", "limits", "_core", "wire", "store", "commands", "auth", "net", "config", "cli", "tools")


def reach(layer: str) -> set[str]:
    """The layers that `layer` may use, itself included."""
    found: set[str] = set()
    waiting = [layer]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += USES[name]
    return found


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with the full dotted name that it asks for."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node, ".".join([*parts, alias.name])


def matches(module: str, names: tuple[str, ...]) -> bool:
    """Whether the module is one of the names, inside one, or starts with one that ends in an underscore."""
    return any(module == f"pion.{name}" or module.startswith(f"pion.{name}.".replace("_.", "_")) for name in names)


def check_file(path: Path, root: Path) -> Iterator[str]:
    """Broken rules of one file, as lines to print."""
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    layer = parts[1] if len(parts) > 1 else ""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    outer = set(ast.walk(tree)) - {
        inner
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(function)
    }
    if module == "pion":
        return
    if layer not in USES and layer not in TOP:
        yield f"{path.relative_to(root)}: {layer} is no layer that tools/check_layers.py knows"
        return
    for node, name in imports(tree, module, is_package):
        where = f"{path.relative_to(root)}:{node.lineno}: {module}"
        package, _, rest = name.partition(".")
        if package == "pion":
            target = rest.partition(".")[0]
            if target in TOP and layer not in TOP:
                yield f"{where} imports {name}, which nothing may import"
            elif target in USES and layer in USES and target not in reach(layer):
                below = ", ".join(sorted(reach(layer) - {layer})) or "nothing"
                yield f"{where} imports {name}: {layer} may use {below}"
        elif package == "trio" and not matches(module, TRIO):
            yield f"{where} imports trio, which lives in {', '.join(TRIO)} only"
        elif package in LAZY and node in outer:
            yield f"{where} imports {package} at the top: only functions may"
        elif package == "numpy" and node in outer and matches(module, NUMPY_FREE):
            yield f"{where} imports numpy at the top: the server starts without it"


def check(root: Path = ROOT) -> list[str]:
    """Every broken rule of the package below `root`."""
    return [line for path in sorted((root / "pion").rglob("*.py")) for line in check_file(path, root)]


if __name__ == "__main__":
    broken = check()
    print("\n".join(broken) or "layers: every import points downward")
    sys.exit(1 if broken else 0)
