"""Attention in the server: what the ``attend_*`` methods send and make of the answers, as steps all clients share.

K/V of a namespace are held under its name with ``_attn`` behind it. What went for others (COLDMISS) is loaded again
from the stored prefix, once, and the question is asked again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion.client.connection import Command, Flight, Steps
from pion.client.errors import AttendError
from pion.errors import AuthenticationError, CommandError, utf8
from pion.wire.resp import Part, ReplyError

__all__ = ["F32", "Attend", "Fused", "Pinned", "as_f32", "head_map_of", "raise_refused", "session", "warm"]

F32 = NDArray[np.float32]

_SUFFIX: Final = b"_attn"
_DIGITS: Final = 32  # of a digest in the name of a session
_ANY_TOP_K: Final = 1024  # sent where nobody knows the length; the server attends to all keys anyway
_REMEMBERED: Final = 4096  # namespaces whose length is remembered
_SELECTORS: Final = {"block_mean": 0, "block-mean": 0, "": 0, "quest": 1}
_NO_WINDOW: Final = -1  # of the server's own; stands where a later argument needs a window before it


class Pinned(str):
    """A namespace, and what it held when it was asked for. Its session is one of that digest alone: when the name is
    given to something else, questions fail, and are never answered with another prefix's K/V."""

    __slots__ = ("digest",)
    digest: str

    @classmethod
    def of(cls, namespace: str, digest: str | None) -> str:
        """The namespace as it is where there is no digest."""
        if not digest:
            return namespace
        made = cls(namespace)
        made.digest = digest
        return made


def session(namespace: str | bytes) -> bytes:
    """The session that holds the K/V of a namespace."""
    if isinstance(namespace, Pinned):
        return f"{utf8(str(namespace), 'the namespace').decode()}:{namespace.digest[:_DIGITS]}".encode() + _SUFFIX
    return (utf8(namespace, "the namespace") if isinstance(namespace, str) else namespace) + _SUFFIX


def as_f32(given: Any) -> F32:
    """A numpy or mlx array of any float dtype as contiguous little-endian fp32; a copy only where it must be."""
    if type(given).__module__.partition(".")[0] == "mlx":
        import mlx.core as mx

        given = np.asarray(given.astype(mx.float32))
    return np.ascontiguousarray(given, "<f4")


def head_map_of(head_map: Any, heads: int, kv_heads: int) -> NDArray[np.uint8]:
    """Heads of K/V by query head, (H_q,) u8; None: the usual one.

    Raises:
        ValueError: it is of another shape, or names a head that is not there.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"H_q={heads} must be a multiple of H_kv={kv_heads}")
    if head_map is None:
        return np.repeat(np.arange(kv_heads, dtype=np.uint8), heads // kv_heads)
    found = np.asarray(head_map)
    if found.shape != (heads,):
        raise ValueError(f"head_map must be of shape ({heads},), not {found.shape}")
    if found.size and (found.min() < 0 or found.max() >= kv_heads):
        raise ValueError(f"head_map names heads beyond H_kv={kv_heads}")
    return np.ascontiguousarray(found, np.uint8)


@dataclass(frozen=True)
class Fused:
    """A checked question over a prefix and a suffix, in fp32.

    Attributes:
        layer: of the session.
        q: (H_q, M, D).
        k_suf, v_suf: (H_kv, S, D).
        head_map: (H_q,) u8.
        window: of the prefix; None: the server's own, 0: all of it.
    """

    layer: int
    q: F32
    k_suf: F32
    v_suf: F32
    head_map: NDArray[np.uint8]
    window: int | None

    @classmethod
    def of(cls, layer: int, q: Any, k_suf: Any, v_suf: Any, head_map: Any, window: int | None) -> Fused:
        """Check what was given.

        Raises:
            ValueError: shapes that do not fit; the text says which.
        """
        q, k_suf, v_suf = as_f32(q), as_f32(k_suf), as_f32(v_suf)
        if q.ndim != 3:
            raise ValueError(f"Q must be (H_q, M, D), not {q.shape}")
        heads = _check_suffix(q.shape[0], q.shape[2], k_suf, v_suf)
        return cls(_layer(layer), q, k_suf, v_suf, head_map_of(head_map, q.shape[0], heads), _window(window))


def _check_suffix(heads: int, dim: int, k_suf: F32, v_suf: F32) -> int:
    """The heads of K/V of a suffix that fits."""
    if k_suf.ndim != 3 or v_suf.ndim != 3:
        raise ValueError(f"K_suf and V_suf must be (H_kv, S, D), not {k_suf.shape} and {v_suf.shape}")
    if k_suf.shape != v_suf.shape:
        raise ValueError(f"K_suf {k_suf.shape} and V_suf {v_suf.shape} must be of one shape")
    if k_suf.shape[2] != dim:
        raise ValueError(f"Q has D={dim}, K_suf has D={k_suf.shape[2]}")
    if not k_suf.shape[0] or heads % k_suf.shape[0]:
        raise ValueError(f"H_q={heads} must be a multiple of H_kv={k_suf.shape[0]}")
    return int(k_suf.shape[0])


def _layer(layer: int) -> int:
    if not isinstance(layer, int) or layer < 0:
        raise ValueError(f"layer_id must be an int of at least 0, not {layer!r}")
    return layer


def _window(window: int | None) -> int | None:
    if window is not None and (not isinstance(window, int) or window < _NO_WINDOW):
        raise ValueError(
            f"fa_window must be a number of positions, 0 for all, -1 or None for the server's, not {window!r}"
        )
    return window


def _words(array: NDArray[Any]) -> Part:
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _options(window: int | None, sinks: Any, heads: int, *more: Part) -> list[Part]:
    options: list[Part] = [] if window is None else [window]
    options += more
    if sinks is not None:
        found = as_f32(sinks)
        if found.ndim not in (1, 2) or found.shape[0] != heads:
            raise ValueError(f"sinks must be (H_q,) or (H_q, M) with H_q={heads}, not {found.shape}")
        options += ["SINKS", _words(found)]
    return options


def raise_refused(reply: Any, command: str) -> None:
    """Raise for an error reply.

    Raises:
        AuthenticationError: credentials are missing or not enough.
        AttendError: any other.
    """
    if not isinstance(reply, ReplyError):
        return
    if reply.code in ("NOAUTH", "WRONGPASS", "NOPERM"):
        raise AuthenticationError(str(reply))
    raise AttendError(f"{reply} ({command} failed)")


def warm(namespace: str | bytes, heads: int, dim: int) -> Steps[int]:
    """Load a stored prefix into the attention engine; how many layers were loaded.

    Args:
        heads: of K/V, not of queries.

    Raises:
        AttendError: the namespace is not stored, or the server computes no attention.
    """
    name = namespace.encode() if isinstance(namespace, str) else namespace
    only = ["DIGEST", namespace.digest] if isinstance(namespace, Pinned) else []
    (reply,) = yield Flight([["KV.PREFIX.WARM", name, heads, dim, session(namespace), *only]])
    raise_refused(reply, "KV.PREFIX.WARM")
    count = str(reply).partition(" ")[0]
    if not count.isdigit():
        raise AttendError(f"ERR KV.PREFIX.WARM answered {reply!r}")
    return int(count)


class Attend:
    """The questions, and what became of them. Any thread.

    Attributes:
        cold_rehydrates: questions that were answered after their K/V were loaded again.
    """

    def __init__(self) -> None:
        self.cold_rehydrates = 0
        self._lengths: OrderedDict[str | bytes, int] = OrderedDict()
        self._counting = threading.Lock()

    def after_fork(self) -> None:
        """In a forked child: a lock that was held is the parent's."""
        self._counting = threading.Lock()

    def remember(self, namespace: str | bytes, rows: int) -> None:
        """How long the prefix of a namespace is."""
        with self._counting:
            self._lengths[namespace] = rows
            self._lengths.move_to_end(namespace)
            if len(self._lengths) > _REMEMBERED:
                self._lengths.popitem(last=False)

    def store_layer(self, namespace: str | bytes, layer: int, k: Any, v: Any) -> Steps[None]:
        """ATTEND.PREFIX.STORE of (H, N, D) both."""
        k, v = as_f32(k), as_f32(v)
        if k.ndim != 3 or k.shape != v.shape or not k.size:
            raise ValueError(f"K and V must be (H, N, D), alike and not empty, not {k.shape} and {v.shape}")
        command: Command = ["ATTEND.PREFIX.STORE", session(namespace), _layer(layer), *k.shape, _words(k), _words(v)]
        (reply,) = yield Flight([command])
        if reply != "OK":
            raise_refused(reply, "ATTEND.PREFIX.STORE")
            raise AttendError(f"ERR ATTEND.PREFIX.STORE failed: {reply!r}")
        self.remember(namespace, k.shape[1])

    def drop(self, namespaces: Sequence[str | bytes]) -> Steps[int]:
        """Free what the server holds for attention; how many layers that were."""
        with self._counting:
            for namespace in namespaces:
                self._lengths.pop(namespace, None)
        if not namespaces:
            return 0
        (reply,) = yield Flight([["ATTEND.PREFIX.DROP", *map(session, namespaces)]])
        raise_refused(reply, "ATTEND.PREFIX.DROP")
        return int(reply)

    def query(
        self, namespace: str | bytes, layer: int, q: Any, top_k: int, with_lse: bool, window: int | None, sinks: Any
    ) -> Steps[Any]:
        """ATTEND.PREFIX.QUERY, one row a head or many."""
        q = as_f32(q)
        if q.ndim not in (2, 3) or not q.size:
            raise ValueError(f"Q must be (H, D) or (H, M, D), not {q.shape}")
        if with_lse and q.ndim == 2:
            raise ValueError("with_lse=True requires M>1 (Q.ndim==3)")
        heads, dim, rows = q.shape[0], q.shape[-1], q.shape[1] if q.ndim == 3 else 1
        if top_k <= 0:
            top_k = self._lengths.get(namespace, _ANY_TOP_K)
        more = ["WITHLSE"] if with_lse and rows == 1 else []
        command: Command = [
            "ATTEND.PREFIX.QUERY", session(namespace), _layer(layer), heads, dim, top_k, _words(q),
            *_options(_window(window), sinks, heads, *more),
        ]  # fmt: skip
        reply = yield from self._asked(command, namespace, heads, dim)
        values = _values(reply, command)
        expected = q.size + (heads * rows if rows > 1 or with_lse else 0)
        if with_lse and len(values) == q.size:
            raise AttendError("ERR ATTEND.PREFIX.QUERY response missing LSE trailer")
        if len(values) != expected:
            raise AttendError(f"ERR ATTEND.PREFIX.QUERY answered {len(values)} values, not {expected}")
        out = values[: q.size].reshape(q.shape).copy()
        return (out, values[q.size :].reshape(heads, rows).copy()) if with_lse else out

    def query_fused(self, namespace: str | bytes, asked: Fused, sinks: Any = None) -> Steps[F32]:
        """ATTEND.PREFIX.QUERY_FUSED."""
        (heads, _, dim), (kv_heads, suffix, _) = asked.q.shape, asked.k_suf.shape
        command: Command = [
            "ATTEND.PREFIX.QUERY_FUSED", session(namespace), asked.layer, heads, dim, suffix, kv_heads, _words(asked.q),
            _words(asked.k_suf), _words(asked.v_suf), _words(asked.head_map), *_options(asked.window, sinks, heads),
        ]  # fmt: skip
        reply = yield from self._asked(command, namespace, kv_heads, dim)
        return _shaped(reply, command, asked.q.shape)

    def query_sparse_auto(
        self, namespace: str | bytes, layer: int, q: Any, block: int, k_top: int, kv_heads: int | None, head_map: Any,
        window: int | None, selector: str, suffix: tuple[Any, Any] | None, sinks: Any, with_mass: bool,
    ) -> Steps[Any]:  # fmt: skip
        """ATTEND.PREFIX.QUERY_SPARSE_AUTO, or the fused one when there is a suffix (K, V)."""
        q = as_f32(q)
        if q.ndim != 2 or not q.size:
            raise ValueError(f"Q must be (H_q, D): sparse attention is of one row a head, not {q.shape}")
        if selector not in _SELECTORS:
            raise ValueError(f"unknown selector {selector!r}; expected 'block_mean' or 'quest'")
        heads, dim = q.shape
        kv_heads = heads if kv_heads is None else kv_heads
        if block < 1 or k_top < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"B={block} and K_top={k_top} must be at least 1, H_q={heads} a multiple of H_kv={kv_heads}"
            )
        name = "ATTEND.PREFIX.QUERY_SPARSE_AUTO"
        sizes: list[Part] = [session(namespace), _layer(layer), heads, dim, block, k_top, kv_heads]
        tensors: list[Part] = [_words(q)]
        if suffix is not None:
            k_suf, v_suf = as_f32(suffix[0]), as_f32(suffix[1])
            if _check_suffix(heads, dim, k_suf, v_suf) != kv_heads:
                raise ValueError(f"K_suf has {k_suf.shape[0]} heads, H_kv is {kv_heads}")
            name += "_FUSED"
            sizes.append(k_suf.shape[1])
            tensors += [_words(k_suf), _words(v_suf)]
        usual = head_map is None and heads == kv_heads
        tensors.append(b"" if usual else _words(head_map_of(head_map, heads, kv_heads)))
        if _SELECTORS[selector]:
            options = _options(_NO_WINDOW if window is None else _window(window), sinks, heads, 1)
        else:
            options = _options(_window(window), sinks, heads)
        command: Command = [name, *sizes, *tensors, *options, *(["WITHMASS"] if with_mass else [])]
        reply = yield from self._asked(command, namespace, kv_heads, dim)
        if not with_mass:
            return _shaped(reply, command, q.shape)
        if not isinstance(reply, list) or len(reply) != 2:
            raise AttendError(f"ERR {name} answered no mass")
        return _shaped(reply[0], command, q.shape), _shaped(reply[1], command, (heads,))

    def _asked(self, command: Command, namespace: str | bytes, kv_heads: int, dim: int) -> Steps[Any]:
        """The reply of a question; where it is a cold miss, of the second try."""
        (reply,) = yield Flight([command])
        if isinstance(reply, ReplyError) and reply.code == "COLDMISS":
            yield from self.rehydrate(namespace, kv_heads, dim, str(reply))
            (reply,) = yield Flight([command])
        raise_refused(reply, str(command[0]))
        return reply

    def rehydrate(self, namespace: str | bytes, kv_heads: int, dim: int, why: str) -> Steps[None]:
        """Load the K/V of a namespace again.

        Raises:
            AttendError: there is nothing to load them from.
        """
        try:
            loaded = yield from warm(namespace, kv_heads, dim)
        except AuthenticationError:
            raise
        except CommandError as error:
            raise AttendError(f"{why}; {error}") from error
        if not loaded:
            raise AttendError(f"{why}; KV.PREFIX.WARM with {kv_heads} heads of {dim} loaded no layer")
        with self._counting:
            self.cold_rehydrates += 1


def _values(reply: Any, command: Command) -> F32:
    if not isinstance(reply, bytes | bytearray | memoryview) or len(reply) % 4:
        raise AttendError(f"ERR {command[0]!s} answered {str(reply)[:80]!r}, no tensor")
    return np.frombuffer(reply, "<f4")


def _shaped(reply: Any, command: Command, shape: tuple[int, ...]) -> F32:
    values = _values(reply, command)
    if values.size != int(np.prod(shape)):
        raise AttendError(f"ERR {command[0]!s} answered {values.size} values, not {shape}")
    shaped: F32 = values.reshape(shape).copy()
    return shaped
