"""The engine's tests of small shapes with Metal's kernels; the others are marked slow in `test_engine`."""

from __future__ import annotations

import pytest

from tests.attention.test_engine import (  # noqa: F401 - they run here with the fixture of this file
    test_a_layer_of_another_shape_is_missing,
    test_a_table_that_does_not_fit_is_not_kept,
    test_blocks_of_the_reference,
    test_bytes_are_bounded_and_given_back,
    test_fused,
    test_half_precision_refuses_what_it_cannot_hold,
    test_indices_of_the_caller,
    test_queries_go_on_while_layers_come_and_go,
    test_sinks,
    test_the_least_recently_used_layer_goes_cold,
    test_the_selectors_differ_where_they_should,
    test_windows,
)
from tests.support.attention import metal


@pytest.fixture(autouse=True)
def computed_by(monkeypatch: pytest.MonkeyPatch) -> str:
    """Every engine of this file computes with kernels."""
    monkeypatch.setattr("pion.attention.engine.make", lambda _, half: metal(half))
    return "metal"
