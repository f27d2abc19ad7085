"""A bounded run of the fuzz targets, so that they cannot rot."""

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.parametrize(("name", "count"), [("resp_fuzz", 5000), ("fastlane_fuzz", 3000)])
def test_the_fuzz_target_holds_for_some_thousand_inputs(name: str, count: int) -> None:
    path = Path(__file__).parents[2] / "fuzz" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.campaign(count, seed=1)
