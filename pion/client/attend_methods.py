"""The ``attend_*`` methods of the clients: attention over K/V that the server holds. See docs/attention.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pion.client.attend import Attend, Fused
from pion.client.attend_lanes import AttendLanes
from pion.client.connection import Steps

__all__ = ["AsyncAttendMethods", "AttendMethods"]


class AttendMethods:
    """For threads. Arrays are numpy or mlx ones in any float dtype; answers are numpy, fp32.

    K/V of a namespace that went for others (COLDMISS) are loaded again from the stored prefix, and the question is
    asked once more.

    Error handling:
        ``ValueError``: shapes that do not fit. ``AttendError`` (a ``CommandError`` and a ``RuntimeError``): the server
        refused, or K/V went cold a second time.
    """

    _attend: AttendLanes

    def _named(self, namespace: str) -> str:
        """The namespace, and what is known to be stored there."""
        return namespace

    def attend_store_layer(self, namespace: str, layer_id: int, K: Any, V: Any) -> None:
        """Hold the K/V of one layer, (H_kv, N, D) both; replaces what was there."""
        self._attend._run(self._attend.store_layer(self._named(namespace), layer_id, K, V))

    def attend_query(
        self, namespace: str, layer_id: int, Q: Any, top_k: int = 0, with_lse: bool = False,
        fa_window: int | None = None, *, sinks: Any = None,
    ) -> Any:  # fmt: skip
        """Attention over all keys of a layer.

        Args:
            Q: (H, D), or (H, M, D) for many rows a head; H as stored. Grouped query heads fold into M.
            top_k: sent along; the server attends to every key.
            with_lse: of (H, M, D), also answer the natural logarithm of the sum of the exponentials of the logits, by
                which parts of a prefix are merged.
            fa_window: only the last so many positions; 0 = all, None = what the server was started with.
            sinks: (H,) fp32, an attention sink for each head.

        Returns:
            Of Q's shape; with `with_lse` a pair of that and (H, M).
        """
        return self._attend.run(
            self._attend.query(self._named(namespace), layer_id, Q, top_k, with_lse, fa_window, sinks)
        )

    def attend_query_fused(
        self, namespace: str, layer_id: int, Q: Any, K_suf: Any, V_suf: Any, head_map: Any,
        fa_window: int | None = None, *, sinks: Any = None,
    ) -> Any:  # fmt: skip
        """Attention over a prefix and a suffix that comes along, in one softmax, causal in the suffix.

        Args:
            Q: (H_q, M, D); row m sees the suffix up to max(S - M, 0) + m.
            K_suf, V_suf: (H_kv, S, D); S may be 0.
            head_map: (H_q,) u8, the head of K/V of each query head; None: the usual one.
            fa_window, sinks: see `attend_query`; a window is one of the prefix.

        Returns:
            (H_q, M, D).
        """
        return self._attend.ask_fused(
            self._named(namespace), Fused.of(layer_id, Q, K_suf, V_suf, head_map, fa_window), sinks
        )

    def attend_query_sparse_auto(
        self, namespace: str, layer_id: int, Q: Any, B: int, K_top: int, H_kv: int | None = None, head_map: Any = None,
        fa_window: int | None = None, selector: str = "block_mean", *, sinks: Any = None, with_mass: bool = False,
    ) -> Any:  # fmt: skip
        """Attention over the K_top blocks of B positions that fit the queries best, and the last block.

        Args:
            Q: (H_q, D), one row a head.
            H_kv: heads of K/V; None: as many as of queries.
            selector: ``block_mean`` or ``quest``.
            with_mass: also answer which share of each head's full softmax was seen, (H_q,).
        """
        asked = self._attend.query_sparse_auto(
            self._named(namespace), layer_id, Q, B, K_top, H_kv, head_map, fa_window, selector, None, sinks, with_mass
        )
        return self._attend.run(asked)

    def attend_query_sparse_auto_fused(
        self, namespace: str, layer_id: int, Q: Any, B: int, K_top: int, K_suf: Any, V_suf: Any,
        H_kv: int | None = None, head_map: Any = None, fa_window: int | None = None, selector: str = "block_mean", *,
        sinks: Any = None, with_mass: bool = False,
    ) -> Any:  # fmt: skip
        """The same, and all of a suffix (H_kv, S, D), of which `H_kv` follows."""
        asked = self._attend.query_sparse_auto(
            self._named(namespace), layer_id, Q, B, K_top, _heads(H_kv, K_suf), head_map, fa_window, selector,
            (K_suf, V_suf), sinks, with_mass,
        )  # fmt: skip
        return self._attend.run(asked)

    def attend_drop(self, namespace: str, *more: str) -> int:
        """Free what the server holds of these namespaces for attention; how many layers that were. What is stored of
        them stays."""
        dropped: int = self._attend._run(self._attend.drop((namespace, *more)))
        return dropped


def _heads(heads: int | None, k_suf: Any) -> int | None:
    shape: tuple[int, ...] = getattr(k_suf, "shape", ())
    return int(shape[0]) if heads is None and len(shape) == 3 else heads


class AsyncAttendMethods:
    """The same for trio; see `AttendMethods`. Questions go over RESP."""

    _attend: Attend
    _run: Callable[[Steps[Any]], Any]

    async def attend_store_layer(self, namespace: str, layer_id: int, K: Any, V: Any) -> None:
        """See `AttendMethods.attend_store_layer`."""
        await self._run(self._attend.store_layer(namespace, layer_id, K, V))

    async def attend_query(
        self, namespace: str, layer_id: int, Q: Any, top_k: int = 0, with_lse: bool = False,
        fa_window: int | None = None, *, sinks: Any = None,
    ) -> Any:  # fmt: skip
        """See `AttendMethods.attend_query`."""
        return await self._run(self._attend.query(namespace, layer_id, Q, top_k, with_lse, fa_window, sinks))

    async def attend_query_fused(
        self, namespace: str, layer_id: int, Q: Any, K_suf: Any, V_suf: Any, head_map: Any,
        fa_window: int | None = None, *, sinks: Any = None,
    ) -> Any:  # fmt: skip
        """See `AttendMethods.attend_query_fused`."""
        asked = Fused.of(layer_id, Q, K_suf, V_suf, head_map, fa_window)
        return await self._run(self._attend.query_fused(namespace, asked, sinks))

    async def attend_query_sparse_auto(
        self, namespace: str, layer_id: int, Q: Any, B: int, K_top: int, H_kv: int | None = None, head_map: Any = None,
        fa_window: int | None = None, selector: str = "block_mean", *, sinks: Any = None, with_mass: bool = False,
    ) -> Any:  # fmt: skip
        """See `AttendMethods.attend_query_sparse_auto`."""
        asked = self._attend.query_sparse_auto(
            namespace, layer_id, Q, B, K_top, H_kv, head_map, fa_window, selector, None, sinks, with_mass
        )
        return await self._run(asked)

    async def attend_query_sparse_auto_fused(
        self, namespace: str, layer_id: int, Q: Any, B: int, K_top: int, K_suf: Any, V_suf: Any,
        H_kv: int | None = None, head_map: Any = None, fa_window: int | None = None, selector: str = "block_mean", *,
        sinks: Any = None, with_mass: bool = False,
    ) -> Any:  # fmt: skip
        """See `AttendMethods.attend_query_sparse_auto_fused`."""
        asked = self._attend.query_sparse_auto(
            namespace, layer_id, Q, B, K_top, _heads(H_kv, K_suf), head_map, fa_window, selector, (K_suf, V_suf), sinks,
            with_mass,
        )  # fmt: skip
        return await self._run(asked)

    async def attend_drop(self, namespace: str, *more: str) -> int:
        """See `AttendMethods.attend_drop`."""
        dropped: int = await self._run(self._attend.drop((namespace, *more)))
        return dropped
