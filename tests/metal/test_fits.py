"""Which calls the kernels take, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion import metal_kernels
from pion.attention.metal_ops import MetalBackend
from pion.metal_kernels import fits
from pion.metal_kernels.bodies import BODIES
from tests.metal.emulated import OnMlx
from tests.metal.emulator import threadgroup_bytes
from tests.metal.test_attention_faults import every_template
from tests.support import models
from tests.support.attention import normal


def test_the_threadgroup_memory_that_is_counted_is_that_of_the_texts() -> None:
    for name, (body, templates) in every_template().seen.items():
        for template in templates.values():
            given: dict[str, int] = {"dim": int(template.get("D", 0))}
            if "R" in template:
                given["rows"] = int(template["R"])
            if "ROOM" in template:
                given["blocks"] = int(template["ROOM"])
            assert fits.threadgroup_bytes(name, **given) == threadgroup_bytes(body.source, template), (name, template)
    assert set(every_template().seen) == set(BODIES)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({}, None),
        ({"dim": 512, "stored": 200_000, "heads": 256}, None),
        ({"dim": 520}, "heads of 520 values: 1 to 512"),
        ({"dim": 0}, "heads of 0 values"),
        ({"kv_heads": 256, "stored": 1 << 18}, f"{1 << 32} values of keys"),
        ({"heads": 256, "length": 1 << 18}, f"{1 << 32} values of queries"),
        ({"kv_heads": 256, "suffix": 1 << 18}, f"{1 << 32} values of a suffix"),
        ({"picked": 1 << 20, "block": 1 << 12}, f"{1 << 32} places"),
        ({"block": (1 << 32) - 5}, "places"),
        ({"nbytes": 1 << 32}, f"{1 << 32} bytes of rows"),
        ({"blocks": 16384}, None),
        ({"blocks": 16385}, "16385 blocks: at most 16384"),
    ],
)
def test_what_the_kernels_take(call: dict[str, int], why: str | None) -> None:
    usual = {"heads": 8, "length": 1, "dim": 64, "kv_heads": 8, "stored": 1000, **call}
    places = [usual.pop(name) for name in ("heads", "length", "dim", "kv_heads", "stored")]
    found = metal_kernels.unfit(*places, **usual)
    assert (found is None) is (why is None)
    assert why is None or (found is not None and why in found)


def test_threadgroup_memory_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "THREADGROUP_BYTES", 1 << 13)
    found = metal_kernels.unfit(8, 1, 512, 8, 1000)
    assert found is not None
    assert "bytes of threadgroup memory: at most 8192" in found


class Untouched(OnMlx):
    """A device on which nothing may run."""

    def call(self, body: Any, *rest: Any) -> list[Any]:
        raise AssertionError(f"{body.name} ran")


def ask(backend: Any) -> list[Any]:
    """Every method with a kernel."""
    k, v, q = normal(1, 2, 50, 16), normal(2, 2, 50, 16), normal(3, 2, 2, 16)
    held = backend.hold(k, v)
    table = backend.table(held, 8, "quest")
    return [
        *backend.dense(held, q, 7),
        *backend.fused(held, q, k[:, :3], v[:, :3], 2),
        backend.sums(held, q),
        *backend.over(held, q, [(3, 9), (20, 31)]),
        *backend.picked(held, q[:, 0], [np.arange(9), np.array([4])]),
        backend.means(held, 8),
        *(np.array(side) for side in table),
        *backend.sparse(held, q[:, 0], np.arange(2), table, 8, 2, "quest", (k[:, :3], v[:, :3]), 5),
    ]


def test_the_twins_compute_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    models.need_mlx()
    with pytest.raises(AssertionError, match="ran"):
        ask(MetalBackend(how=Untouched()))
    want = ask(MetalBackend(how="ops"))
    monkeypatch.setattr(metal_kernels, "unfit", lambda *_, **__: "too much of it")
    for one, other in zip(ask(MetalBackend(how=Untouched())), want, strict=True):
        assert np.array_equal(one, other)


def test_more_blocks_than_a_threadgroup_ranks() -> None:
    """The choice is made by the twin, what was chosen is read by the kernel."""
    models.need_mlx()
    k, q = normal(1, 1, 20_000, 8), normal(3, 1, 8)
    k[0, 12_345] = 9 * q[0]
    device = OnMlx()
    backend = MetalBackend(how=device)
    held = backend.hold(k, k)
    found = backend.sparse(held, q, np.zeros(1, np.int64), (held.keys,), 1, 5, "block_mean", None, 0)
    logits = k[0] @ q[0] * 1.0
    best = np.append(np.argsort(-logits)[:5], 19_999)
    weights = np.exp(logits[best] - logits[best].max())
    assert np.abs(found[0][0] - weights @ k[0, best] / weights.sum()).max() < 1e-5
