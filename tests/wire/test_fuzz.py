"""A bounded run of the fuzz target, so that it cannot rot."""

import importlib.util
from pathlib import Path


def test_the_fuzz_target_holds_for_some_thousand_inputs() -> None:
    path = Path(__file__).parents[2] / "fuzz" / "resp_fuzz.py"
    spec = importlib.util.spec_from_file_location("resp_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.campaign(5000, seed=1)
