"""The wheel: what is in it, and that it works where nothing else is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")

pytestmark = pytest.mark.timeout(900)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program without this environment's paths; its output, or a failure that shows it."""
    clean = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def copy_sources(target: Path) -> None:
    """What a clone has, with its times: tracked files and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def empty_environment(folder: Path) -> Path:
    """The Python of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, packed from what `make build` compiled."""
    tree = tmp_path_factory.mktemp("tree")
    copy_sources(tree)
    built = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "pion" / "_core"
    built.mkdir(parents=True)
    for path in (ROOT / "pion" / "_core").glob("*.c"):
        shutil.copy2(path, tree / "pion" / "_core")
    for path in (ROOT / "pion" / "_core").glob("*.so"):
        shutil.copy2(path, built)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, tree, cwd=tree)
    (made,) = out.glob("pion_server-*.whl")
    return made


def test_the_wheel_holds_the_interface_and_no_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    core = {Path(name).name for name in names if name.startswith("pion/_core/")}
    for module in (path.stem for path in (ROOT / "pion" / "_core").glob("*.pyx")):
        assert {f"{module}.pxd", f"{module}.pyi"} <= core
        assert sum(name.startswith(f"{module}.") and name.endswith(".so") for name in core) == 1, module
    assert {path.name for path in (ROOT / "pion" / "_core").glob("*.h")} <= core
    assert "pion/py.typed" in names
    assert not [name for name in names if name.endswith((".c", ".pyx", "_built.txt"))]
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pion", "pion_vllm_mlx"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=tmp_path)
    assert "smoke test passed" in run(python, SMOKE, cwd=tmp_path)


@pytest.mark.slow
def test_pip_installs_a_clean_copy_and_its_sdist(tmp_path: Path) -> None:
    tree = tmp_path / "clean copy"
    tree.mkdir()
    copy_sources(tree)
    python = empty_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", tree, cwd=tmp_path)
    assert "smoke test passed" in run(python, SMOKE, cwd=tmp_path)

    run(python, "-m", "pip", "install", "-q", "build", cwd=tmp_path)
    run(python, "-m", "build", "--sdist", "--outdir", tmp_path / "dist", tree, cwd=tmp_path)
    (sdist,) = (tmp_path / "dist").glob("pion_server-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pion/_core/quant.pyx", "pion/_core/quant.h", "setup.py", "Makefile", "tests/core/test_quant.py"} <= names
    assert not [name for name in names if name.startswith("pion/_core/") and name.endswith((".c", ".so"))]
