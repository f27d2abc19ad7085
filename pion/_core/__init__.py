"""The compiled core: bytes, numbers, and the system calls of the network plane.

One extension module per .pyx, its C kernels in the .h beside it, its interface for other Cython code in the .pxd (which
may change in a minor release) and for type checkers in the .pyi. Nothing here imports the layers above.
"""

import warnings
from pathlib import Path
from typing import NoReturn

from pion._core import _sources

_FOLDER = Path(__file__).parent


def get_include() -> str:
    """The folder of the C headers: an extension that cimports from pion._core needs it among its include_dirs."""
    return str(_FOLDER)


def __getattr__(name: str) -> NoReturn:
    if (_FOLDER / f"{name}.pyx").is_file() and not any(_FOLDER.glob(f"{name}.*so")):
        raise ImportError(f"pion._core.{name} is not compiled in {_FOLDER}: run `make build`")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Only a source tree has a stamp; an installed package has no sources that could have changed.
if _stale := _sources.stale(_FOLDER):
    warnings.warn(
        f"pion._core: {', '.join(_stale)} built from other sources than those in {_FOLDER}: run `make build`",
        RuntimeWarning,
        stacklevel=2,
    )
