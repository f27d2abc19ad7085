"""Another project's Cython code compiles against the .pxd files and headers, and works."""

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pion._core import membership, quant

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_an_extension_outside_the_package_cimports_the_core(tmp_path: Path) -> None:
    for source in (ROOT / "tests" / "downstream").iterdir():
        if source.is_file():
            shutil.copy(source, tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CFLAGS": "-O1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("downstream.*.so")
    spec = importlib.util.spec_from_file_location("downstream", built)
    assert spec is not None
    assert spec.loader is not None
    downstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(downstream)

    rows = struct.pack("<80f", *(value / 7 for value in range(80)))
    assert downstream.to_int8(rows, 40) == quant.encode(quant.FP32, quant.INT8, rows, 40)
    with pytest.raises(ValueError, match="row 1"):
        downstream.to_int8(struct.pack("<4f", 1, 2, 3, 1e5), 2)
    table = membership.build(struct.pack("<3Q", 5, 6, 7))
    assert downstream.first_eight(table, struct.pack("<4Q", 7, 1, 5, 2)) == 0b0101
    assert downstream.first_eight(b"no table", struct.pack("<Q", 1)) == -1
    assert downstream.number_reply(-42) == b":-42\r\n"
