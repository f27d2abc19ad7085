"""Which source files a compiled module is made of, and one number over their contents.

Used by setup.py, which stamps what it built, and by the package, which says so when the sources have changed since.
Imports nothing of the package: setup.py loads this file alone.
"""

import re
import zlib
from pathlib import Path

STAMP = "_built.txt"

_INCLUDE = re.compile(r'^\s*(?:cdef\s+extern\s+from|#\s*include)\s+"([\w./]+)"', re.MULTILINE)
_CIMPORT = re.compile(r"^\s*from\s+pion\._core(?:\.(\w+))?\s+cimport\s+\(?([^)\n]*)", re.MULTILINE)


def _named_in(text: str) -> list[str]:
    names = _INCLUDE.findall(text)
    for module, imported in _CIMPORT.findall(text):
        modules = [module] if module else [part.split()[0] for part in imported.split(",") if part.strip()]
        names += [f"{name}.pxd" for name in modules]
    return names


def sources(folder: Path, module: str) -> list[Path]:
    """The .pyx of a module with every .pxd and header that it names, directly or through another."""
    found: dict[str, Path] = {}
    waiting = [f"{module}.pyx", f"{module}.pxd"]
    while waiting:
        name = waiting.pop()
        path = folder / name
        if name not in found and path.is_file():
            found[name] = path
            waiting += _named_in(path.read_text(encoding="utf-8"))
    return [found[name] for name in sorted(found)]


def digest(paths: list[Path]) -> str:
    """Eight hex digits that change with the name or content of any of the files."""
    crc = 0
    for path in paths:
        content = path.read_bytes() if path.is_file() else b"gone"
        crc = zlib.crc32(content, zlib.crc32(path.name.encode(), crc))
    return f"{crc:08x}"


def stamp_line(folder: Path, module: str) -> str:
    """What the stamp keeps of a module: its name, the digest, and the files that were digested."""
    paths = sources(folder, module)
    return " ".join([module, digest(paths), *(path.name for path in paths)])


def read_stamp(folder: Path) -> dict[str, str]:
    """Module name to its stamp line; empty when nothing was built in this folder."""
    path = folder / STAMP
    lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
    return {line.partition(" ")[0]: line for line in lines}


def stale(folder: Path) -> list[str]:
    """Modules built in this folder from other sources than those that lie in it now."""
    changed = []
    for line in read_stamp(folder).values():
        module, value, *names = line.split(" ")
        if digest([folder / name for name in names]) != value:
            changed.append(module)
    return changed
