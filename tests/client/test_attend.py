"""The attend_* methods against a real server and an oracle in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import AsyncClient, Client, PionPromptCache
from pion.client.errors import AttendError
from pion.errors import AuthenticationError, CommandError
from pion.testing import server as start_server
from tests.support import models

H_Q, H_KV, N, D, S, M = 6, 2, 77, 16, 9, 4


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


K, V = normal(H_KV, N, D, seed=1), normal(H_KV, N, D, seed=2)
K_SUF, V_SUF = normal(H_KV, S, D, seed=3), normal(H_KV, S, D, seed=4)
HEADS = np.repeat(np.arange(H_KV, dtype=np.uint8), H_Q // H_KV)


def oracle(q: Any, k: Any, v: Any, seen: Any = None, sinks: Any = None) -> tuple[Any, Any]:
    """q (H, M, D), k and v (H, T, D), seen (M, T) -> out and lse, float64."""
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2) / np.sqrt(q.shape[2])
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=2)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], axis=1)
    top = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2, keepdims=True)
    return weights / total @ v, (top + np.log(total))[..., 0]


def both(window: int | None = None) -> tuple[Any, Any, Any]:
    """K and V of prefix and suffix by query head, and what M rows see of them."""
    first = N - window if window else 0
    k, v = (np.concatenate([a[:, first:], b], axis=1)[HEADS] for a, b in ((K, K_SUF), (V, V_SUF)))
    columns = np.arange(k.shape[1])[None]
    return k, v, columns <= (k.shape[1] - M + np.arange(M))[:, None]


def close(got: Any, want: Any) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with Client(host=server.host, port=server.port, timeout=30) as client:
        client.attend_store_layer("doc", 3, K, V)
        yield client
        client.attend_drop("doc")


def test_query_of_one_row_of_many_and_with_lse(client: Client) -> None:
    q = normal(H_KV, M, D, seed=5)
    out, lse = oracle(q, K, V)
    close(client.attend_query("doc", 3, q[:, 0]), out[:, 0])
    close(client.attend_query("doc", 3, q), out)
    got = client.attend_query("doc", 3, q, with_lse=True)
    close(got[0], out)
    close(got[1], lse)
    got = client.attend_query("doc", 3, q[:, :1], with_lse=True)
    close(got[0], out[:, :1])
    close(got[1], lse[:, :1])
    close(client.attend_query("doc", 3, q, fa_window=11), oracle(q, K[:, -11:], V[:, -11:])[0])
    sinks = normal(H_KV, seed=6)
    close(client.attend_query("doc", 3, q, sinks=sinks), oracle(q, K, V, sinks=sinks)[0])


def test_fused(client: Client) -> None:
    q = normal(H_Q, M, D, seed=7)
    k, v, seen = both()
    close(client.attend_query_fused("doc", 3, q, K_SUF, V_SUF, HEADS), oracle(q, k, v, seen)[0])
    close(client.attend_query_fused("doc", 3, q, K_SUF, V_SUF, None), oracle(q, k, v, seen)[0])
    sinks = normal(H_Q, seed=8)
    close(client.attend_query_fused("doc", 3, q, K_SUF, V_SUF, HEADS, sinks=sinks), oracle(q, k, v, seen, sinks)[0])
    nothing = np.zeros((H_KV, 0, D), np.float32)
    close(client.attend_query_fused("doc", 3, q, nothing, nothing, HEADS), oracle(q, K[HEADS], V[HEADS])[0])
    k, v, seen = both(20)
    close(client.attend_query_fused("doc", 3, q, K_SUF, V_SUF, HEADS, fa_window=20), oracle(q, k, v, seen)[0])
    other = HEADS[::-1].copy()
    want = oracle(q, K[other], V[other])[0]
    close(client.attend_query_fused("doc", 3, q, nothing, nothing, other), want)


@pytest.mark.parametrize("selector", ["block_mean", "quest"])
def test_sparse(client: Client, selector: str) -> None:
    q = normal(H_Q, D, seed=9)
    dense = oracle(q[:, None], K[HEADS], V[HEADS])[0][:, 0]
    close(client.attend_query_sparse_auto("doc", 3, q, 16, 5, H_KV, selector=selector), dense)
    some, mass = client.attend_query_sparse_auto("doc", 3, q, 16, 2, H_KV, HEADS, selector=selector, with_mass=True)
    assert np.abs(some - dense).max() > 1e-3
    assert mass.shape == (H_Q,)
    assert (mass < 0.999).all()
    k, v, seen = both()
    fused = client.attend_query_sparse_auto_fused("doc", 3, q, 16, 5, K_SUF, V_SUF, H_KV, selector=selector)
    close(fused, oracle(q[:, None], k, v, seen[-1:])[0][:, 0])
    close(client.attend_query_sparse_auto_fused("doc", 3, q, 16, 5, K_SUF, V_SUF, selector=selector), fused)
    window = client.attend_query_sparse_auto("doc", 3, q, 16, 5, H_KV, fa_window=12, selector=selector)
    close(window, oracle(q[:, None], K[HEADS][:, -12:], V[HEADS][:, -12:])[0][:, 0])


def test_mlx_arrays_of_any_dtype(client: Client) -> None:
    models.need_mlx()
    mx = models.mx
    k, v = (mx.array(a).astype(mx.bfloat16) for a in (K, V))
    client.attend_store_layer("doc", 4, k, v)
    q = mx.array(normal(H_KV, M, D, seed=5)).astype(mx.float16)
    want = oracle(*(np.array(a.astype(mx.float32)) for a in (q, k, v)))[0]
    close(client.attend_query("doc", 4, q), want)


REFUSED: list[tuple[str, Any, str]] = [
    ("attend_store_layer", (K, V[:, :-1]), "alike"),
    ("attend_query", (normal(D),), r"\(H, D\)"),
    ("attend_query", (normal(1, 1, 1, D),), r"\(H, D\)"),
    ("attend_query", (normal(H_KV, D), 0, True), r"with_lse=True requires M>1 \(Q.ndim==3\)"),
    ("attend_query", (normal(H_KV, D), 0, False, -2), "fa_window"),
    ("attend_query_fused", (normal(H_Q, D), K_SUF, V_SUF, HEADS), r"\(H_q, M, D\)"),
    ("attend_query_fused", (normal(H_Q, M, D), K_SUF[0], V_SUF[0], HEADS), r"\(H_kv, S, D\)"),
    ("attend_query_fused", (normal(H_Q, M, D), K_SUF, V_SUF[:, :2], HEADS), "one shape"),
    ("attend_query_fused", (normal(H_Q, M, 8), K_SUF, V_SUF, HEADS), "D=8"),
    ("attend_query_fused", (normal(5, M, D), K_SUF, V_SUF, HEADS), "multiple of H_kv=2"),
    ("attend_query_fused", (normal(H_Q, M, D), K_SUF, V_SUF, HEADS[:-1]), r"shape \(6,\)"),
    ("attend_query_fused", (normal(H_Q, M, D), K_SUF, V_SUF, HEADS + 1), "beyond H_kv=2"),
    ("attend_query_sparse_auto", (normal(H_Q, M, D), 16, 2, H_KV), "one row a head"),
    ("attend_query_sparse_auto", (normal(H_Q, D), 16, 2, 4), "multiple of H_kv=4"),
    ("attend_query_sparse_auto", (normal(H_Q, D), 0, 2, H_KV), "B=0"),
    (
        "attend_query_sparse_auto", (normal(H_Q, D), 16, 2, H_KV, None, None, "best"),
        "unknown selector 'best'; expected 'block_mean' or 'quest'",
    ),
    ("attend_query_sparse_auto_fused", (normal(H_Q, D), 16, 2, K_SUF, V_SUF, 3), "K_suf has 2 heads"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "given", "why"), REFUSED)
def test_shapes_that_do_not_fit_are_refused_before_anything_is_sent(method: str, given: Any, why: str) -> None:
    with Client(host="127.0.0.1", port=1) as client, pytest.raises(ValueError, match=why):
        getattr(client, method)("doc", 0, *given)


def test_refusals_of_the_server_name_the_command(client: Client) -> None:
    with pytest.raises(AttendError, match=r"ATTEND.PREFIX.QUERY failed \(session not found") as refused:
        client.attend_query("nobody", 0, normal(H_KV, D))
    assert isinstance(refused.value, CommandError)
    assert isinstance(refused.value, RuntimeError)
    with pytest.raises(AttendError, match="QUERY_FUSED failed"):
        client.attend_query_fused("nobody", 0, normal(H_Q, M, D), K_SUF, V_SUF, HEADS)
    with pytest.raises(AttendError, match="STORE failed"):
        client.attend_store_layer("doc", 0, normal(1, 4, 7), normal(1, 4, 7))


def test_drop_frees_on_the_server(client: Client) -> None:
    client.attend_store_layer("doc", 4, K, V)
    assert client.call("ATTEND.PREFIX.LOOKUP", "doc_attn", 4) == "HIT"
    assert client.attend_drop("doc", "nobody") == 2
    assert client.call("ATTEND.PREFIX.LOOKUP", "doc_attn", 4) == "MISS"


async def test_the_client_for_trio(server: Any) -> None:
    async with AsyncClient(host=server.host, port=server.port, timeout=30) as client:
        await client.attend_store_layer("trio", 0, K, V)
        q = normal(H_Q, M, D, seed=7)
        k, v, seen = both()
        close(await client.attend_query_fused("trio", 0, q, K_SUF, V_SUF, HEADS), oracle(q, k, v, seen)[0])
        folded = q.reshape(H_KV, -1, D)
        got = await client.attend_query("trio", 0, folded, with_lse=True)
        close(got[0].reshape(q.shape), oracle(q, K[HEADS], V[HEADS])[0])
        dense = oracle(q[:, :1], K[HEADS], V[HEADS])[0][:, 0]
        close(await client.attend_query_sparse_auto("trio", 0, q[:, 0], 16, 9, H_KV), dense)
        fused = await client.attend_query_sparse_auto_fused("trio", 0, q[:, 0], 16, 9, K_SUF, V_SUF)
        close(fused, oracle(q[:, :1], k, v, seen[-1:])[0][:, 0])
        assert await client.attend_drop("trio") == 1


# --- cold -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with room for two layers."""
    flags = ("--kvcache", "--attend-warm-slots", "2")
    with start_server(*flags, dir=tmp_path_factory.mktemp("small")) as running:
        yield running


def stored(client: Client, name: str) -> None:
    """A stored prefix of two layers, warm."""
    client.store(name, np.stack([K, K + 1]), np.stack([V, V + 1]))
    client.call("KV.PREFIX.WARM", name, H_KV, D, f"{name}_attn")


def made_cold(client: Client) -> None:
    """What is warm goes for others."""
    for layer in range(2):
        client.attend_store_layer("others", layer, K, V)


@pytest.mark.parametrize("kind", [Client, PionPromptCache])
def test_a_cold_miss_is_warmed_with_the_heads_of_k_and_v_and_asked_again(
    small: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads: six of queries over two of K/V, on each kind of question."""
    monkeypatch.setenv("PION_ATTEND_LANE", "resp")
    q = normal(H_Q, M, D, seed=7)
    k, v, seen = both()
    name = f"cold-{kind.__name__}"
    questions = {
        "attend_query": ((normal(H_KV, D, seed=5),), oracle(normal(H_KV, D, seed=5)[:, None], K, V)[0][:, 0]),
        "attend_query_fused": ((q, K_SUF, V_SUF, HEADS), oracle(q, k, v, seen)[0]),
        "attend_query_sparse_auto": ((q[:, 0], 16, 9, H_KV), oracle(q[:, :1], K[HEADS], V[HEADS])[0][:, 0]),
        "attend_query_sparse_auto_fused": (
            (q[:, 0], 16, 9, K_SUF, V_SUF), oracle(q[:, :1], k, v, seen[-1:])[0][:, 0],
        ),
    }  # fmt: skip
    with Client(port=small.port) as client:
        stored(client, name)
        more = {} if kind is Client else {"model": None}
        with kind(host=small.host, port=small.port, **more) as asking:
            for number, (method, (given, want)) in enumerate(questions.items()):
                made_cold(client)
                assert client.call("ATTEND.PREFIX.LOOKUP", f"{name}_attn", 0) == "COLD"
                close(getattr(asking, method)(name, 0, *given), want)
                observed = asking._attend.cold_rehydrates if kind is Client else asking.cold_rehydrates_observed
                assert observed == number + 1


def test_no_cold_miss_was_observed_before_the_first_one() -> None:
    with PionPromptCache(port=1) as pc:
        assert (pc.cold_rehydrates_observed, pc.attend_query_calls, pc.attend_query_ms_total) == (0, 0, 0.0)


def test_a_cold_session_of_nothing_that_is_stored_is_an_error(small: Any) -> None:
    with Client(port=small.port) as client:
        client.attend_store_layer("raw", 0, K, V)
        made_cold(client)
        with pytest.raises(AttendError, match=r"COLDMISS.*namespace not registered"):
            client.attend_query("raw", 0, normal(H_KV, D))
        assert client._attend.cold_rehydrates == 0


def test_a_second_cold_miss_is_an_error(byte_server: Any, answers: dict[str, Any]) -> None:
    def answer(peer: Any, argv: list[bytes]) -> Any:
        if argv[0] == b"KV.PREFIX.WARM":
            return answers["raw"](b"+2 skipped_dim=1\r\n")
        if argv[0] == b"ATTEND.PREFIX.QUERY":
            return answers["error"]("COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)")
        return answers["ordinary"](peer, argv)

    server = byte_server()
    server.answer = answer
    with Client(port=server.port) as client:
        with pytest.raises(RuntimeError, match="COLDMISS"):
            client.attend_query("doc", 0, normal(H_KV, D))
        seen = [argv[0] for argv in server.seen if argv[0].startswith((b"KV", b"ATTEND"))]
        assert seen == [b"ATTEND.PREFIX.QUERY", b"KV.PREFIX.WARM", b"ATTEND.PREFIX.QUERY"]
        warm = next(argv for argv in server.seen if argv[0] == b"KV.PREFIX.WARM")
        assert warm[1:] == [b"doc", b"2", b"16", b"doc_attn"]
        assert client._attend.cold_rehydrates == 1


def test_answers_of_another_length_are_errors(byte_server: Any, answers: dict[str, Any]) -> None:
    server = byte_server()
    with Client(port=server.port) as client:
        for reply in (b"", b"123", b"1234" * (H_KV * D + 1), None, ["12"]):
            server.answer = lambda peer, argv, reply=reply: (
                reply if argv[0].startswith(b"ATTEND") else answers["ordinary"](peer, argv)
            )
            with pytest.raises(AttendError):
                client.attend_query("doc", 0, normal(H_KV, D))
        server.answer = lambda peer, argv: (
            b"1234" * (H_KV * M * D) if argv[0].startswith(b"ATTEND") else answers["ordinary"](peer, argv)
        )
        with pytest.raises(RuntimeError, match="response missing LSE trailer"):
            client.attend_query("doc", 0, normal(H_KV, M, D), with_lse=True)


def test_credentials_and_a_server_without_attention(tmp_path: Path) -> None:
    with start_server("--kvcache", "--attention", "off", "--requirepass", "pw", dir=tmp_path) as server:
        with Client(port=server.port) as client, pytest.raises(AuthenticationError):
            client.attend_query("doc", 0, normal(H_KV, D))
        with Client(port=server.port, password="pw") as client, pytest.raises(AttendError, match="not available"):
            client.attend_query("doc", 0, normal(H_KV, D))
