"""The attention engine of a server: made when it is first needed, fed from stored prefixes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pion import limits
from pion._core.stream import Extents
from pion.commands import kv
from pion.commands.attend_sources import SUFFIX, Sources
from pion.errors import ColdMissError, CommandError, MismatchError

if TYPE_CHECKING:
    from pion.attention.engine import AttentionEngine
    from pion.commands.dispatch import Context

T = TypeVar("T")

#: What commands answer without an engine; which one answers what is part of the published behaviour.
NO_ENGINE: Final = "ERR attention engine not available (start with --metal-attention or --cuda-attention)"
NO_METAL: Final = "ERR Metal attention not available (start with --metal-attention)"


class _Load:
    """A prefix that is being loaded. dropped: it is another one by now."""

    def __init__(self, ns: bytes) -> None:
        self.ns, self.dropped = ns, False
        self.rows = limits.MAX_ROWS  # until they are known


class Attention:
    """The engine or its absence. Before `engine` nothing is computed, and neither numpy nor mlx is loaded."""

    def __init__(self) -> None:
        self.mode, self.half, self.window, self.autowarm = "off", False, 0, False
        self.warm_slots, self.cold_slots = limits.ATTEND_WARM_SLOTS, limits.ATTEND_COLD_SLOTS
        self.max_bytes = limits.ATTEND_MAX_BYTES
        self._made: AttentionEngine | None = None
        self._building = threading.Lock()  # held for as long as it takes to load mlx
        self._lock = threading.Lock()
        self._loading: list[_Load] = []
        self._sources = Sources(lambda: self._made.sessions() if self._made is not None else set())

    def configure(self, options: Any) -> None:
        """Take over the options of a server."""
        self.mode, self.half, self.window = options.attention_mode, options.metal_attention_fp16, options.fa_window
        self.warm_slots, self.cold_slots = options.attend_warm_slots, options.attend_cold_slots
        self.max_bytes = options.attend_max_bytes or _memory_share()
        self.autowarm = options.attend_autowarm

    @property
    def made(self) -> AttentionEngine | None:
        """The engine, if anything was ever stored in it."""
        return self._made

    def require(self, text: str) -> None:
        """Raises CommandError(text) when there is no attention."""
        if self.mode == "off":
            raise CommandError(text)

    def engine(self) -> AttentionEngine:
        """The engine; the first call imports numpy, and mlx where that computes: make it in a thread.

        Raises:
            CommandError: the backend asked for does not work here.
        """
        with self._building:
            if self._made is None:
                from pion.attention.engine import AttentionEngine
                from pion.attention.numpy_ops import calm_blas

                calm_blas()
                try:
                    self._made = AttentionEngine(
                        backend=self.mode, half=self.half, window=self.window, warm_slots=self.warm_slots,
                        cold_slots=self.cold_slots, max_bytes=self.max_bytes,
                    )  # fmt: skip
                except ValueError as error:
                    raise CommandError(f"ERR {error}") from error
            return self._made

    def lookup(self, sid: bytes, layer: int) -> str:
        """HIT, COLD or MISS."""
        return "MISS" if self._made is None else self._made.lookup(sid, layer)

    def figures(self) -> dict[str, int]:
        """What KV.PREFIX.INFO counts. Numbers alone: its readers take every line for one."""
        return {name: value for name, value in self.described().items() if isinstance(value, int)}

    def described(self) -> dict[str, int | str]:
        """The figures, and what computes."""
        out: dict[str, int | str] = {
            "sdpa_warm": 0, "sdpa_cold": 0, "sdpa_demotions": 0, "sdpa_rehydrates": 0, "sdpa_warm_bytes": 0,
            "sdpa_queries": 0, "sdpa_backend": "off" if self.mode == "off" else "none yet", "sdpa_device": "",
        }  # fmt: skip
        if self._made is not None:
            out |= self._made.info()
        return out

    def settings(self) -> dict[str, int | str]:
        """What the server was told."""
        return {
            "attention": self.mode,
            "attention_half": int(self.half),
            "attention_window": self.window,
            "attention_autowarm": int(self.autowarm),
            "sdpa_warm_slots": self.warm_slots,
            "sdpa_cold_slots": self.cold_slots,
            "sdpa_max_bytes": self.max_bytes,
        }

    # --- from stored prefixes -----------------------------------------------------------------------------------------

    def warm(
        self, store: Any, ns: bytes, heads: int, dim: int, sid: bytes, digest: str | None = None
    ) -> tuple[int, int]:
        """Load the layers of a prefix; how many were, and how many were skipped because of their dimension. Blocking.

        Args:
            store: `pion.Engine`.
            heads: of K and V; a layer that is not heads * dim wide has as many heads as fit, if that is a whole number.
            sid: the session to store them in.
            digest: the prefix must have; None: any.

        Raises:
            CommandError: it is not stored, not complete, or another one.
        """
        from pion.attention.engine import supported

        if not supported(dim):
            return 0, 0
        engine = self.engine()
        sides = ns + b"_pk", ns + b"_pv"
        done = skipped = 0
        with self._load_of(ns, sid) as load:
            found = _both(store, *sides, digest)
            load.rows = max((rows for _, rows, _ in found), default=0)
            for layer, rows, width in found:
                own = heads if width == heads * dim else width // dim
                if width <= 0 or own * dim != width:
                    skipped += 1
                    continue
                _load(engine, store, sides, layer, rows, (sid, own, dim))
                done += 1
        return done, skipped

    @contextlib.contextmanager
    def _load_of(self, ns: bytes, sid: bytes) -> Iterator[_Load]:
        """Around loading a prefix into a session: when it is dropped or changed meanwhile, nothing of it stays."""
        load = _Load(ns)
        with self._lock:
            self._loading.append(load)
        try:
            yield load
        finally:
            with self._lock:
                self._loading.remove(load)
                if load.dropped:
                    self._end({sid}, [])
                else:
                    self._sources.note(sid, ns, load.rows, self.warm_slots + self.cold_slots)

    def redefined(self, ns: bytes, start: int | None) -> None:
        """A name stands for another prefix, or rows from `start` on of what it stands for are others than before: what
        is held of them ends. Called by the store, with its lock held."""
        if self._made is None:
            return
        with self._lock:
            gone = self._sources.sessions(ns, start or 0)
            if start is None:
                gone.add(ns + SUFFIX)
            loads = [load for load in self._loading if load.ns == ns and (start or 0) < load.rows]
            self._end(gone, loads)

    def forget(self, *names: bytes) -> None:
        """Prefixes were dropped: what is held of them could be another one's K/V from now on."""
        with self._lock:
            for ns in names:
                gone = {ns + SUFFIX} | self._sources.sessions(ns)
                self._end(gone, [load for load in self._loading if load.ns == ns])

    def forget_all(self) -> None:
        """All prefixes were dropped."""
        with self._lock:
            held = self._made.sessions() if self._made is not None else set()
            self._end(self._sources.all() | {sid for sid in held if sid.endswith(SUFFIX)}, self._loading)

    def _end(self, gone: set[bytes], loads: list[_Load]) -> None:
        for load in loads:
            load.dropped = True
        for sid in gone:
            self._sources.forget(sid)
            if self._made is not None:
                self._made.drop(sid)

    def rehydrate(self, ctx: Context, sid: bytes, layer: int) -> bool:
        """Load one cold layer from the prefix it belongs to, if that is stored as it was here. Blocking."""
        engine = self.engine()
        shape = engine.shape(sid, layer)
        with self._lock:
            ns = self._sources.prefix(sid)
        if shape is None or ns is None or not ns.startswith(kv.ns_prefix(ctx)) or not ctx.engine.kvcache:
            return False
        heads, count, dim = shape
        sides = ns + b"_pk", ns + b"_pv"
        try:
            for found, rows, width in _both(ctx.engine, *sides):
                if found == layer and rows == count and width == heads * dim:
                    with self._load_of(ns, sid) as load:
                        load.rows = rows
                        _load(engine, ctx.engine, sides, layer, rows, (sid, heads, dim))
                    return True
        except CommandError:  # dropped, incomplete or damaged: as good as not stored
            return False
        return False

    def attempt(self, ctx: Context, sid: bytes, layer: int, call: Callable[[AttentionEngine], T]) -> T:
        """Call with the engine; where the layer is cold and autowarm is on, load it and call again. Blocking.

        Raises:
            ColdMissError: it is cold, and stays so.
        """
        import numpy as np

        engine = self.engine()
        with np.errstate(all="ignore"):  # what is not a number in a request is not one in its answer
            try:
                return call(engine)
            except ColdMissError:
                if not self.autowarm or not self.rehydrate(ctx, sid, layer):
                    raise
            return call(engine)


def _both(store: Any, k_sid: bytes, v_sid: bytes, digest: str | None = None) -> list[tuple[int, int, int]]:
    """(layer, rows, values per row) of the layers that have rows on both sides; -1 values where the sides differ.

    Raises:
        CommandError: it is not all there that was declared, or belongs to another digest.
    """
    store.v_prepare(k_sid)
    k, v = store.v_info(k_sid), store.v_info(v_sid)
    if digest is not None and k.declared.digest != digest:
        held = f"digest {k.declared.digest}" if k.declared.digest else "no digest"
        raise MismatchError(f"MISMATCH KV.PREFIX.WARM: {held} is stored, not {digest}")
    rows, layers = k.declared.rows, k.declared.layers
    if rows is not None and layers is not None:
        short = [layer for side in (k, v) for layer in range(layers) if side.rows[layer : layer + 1] != [rows]]
        if short:
            raise CommandError(f"ERR KV.PREFIX.WARM: the prefix is not complete (layer {min(short)})")
    out = []
    for layer, (k_rows, v_rows) in enumerate(zip(k.rows, v.rows, strict=False)):
        (k_dim, _), (v_dim, _) = k.layers[layer], v.layers[layer]
        if k_rows and v_rows:
            out.append((layer, min(k_rows, v_rows), k_dim if k_dim == v_dim else -1))
    return out


def _load(
    engine: AttentionEngine, store: Any, sides: tuple[bytes, bytes], layer: int, rows: int, to: tuple[bytes, int, int]
) -> None:
    import numpy as np

    sid, heads, dim = to
    try:
        if _load_as_stored(engine, store, sides, layer, rows, to):
            return
    except ValueError as error:
        raise CommandError(f"ERR KV.PREFIX.WARM failed (layer {layer}: {error})") from error
    arrays = []
    for side in sides:
        body = store.v_read(side, layer, 0, rows)
        if body is None:
            raise CommandError(f"ERR KV.PREFIX.WARM: the prefix was replaced while it was loaded (layer {layer})")
        flat = np.empty((rows, heads, dim), np.float32)
        body.readinto(flat.data.cast("B"))
        arrays.append(flat.swapaxes(0, 1))
    try:
        engine.store(sid, layer, *arrays)
    except ValueError as error:
        raise CommandError(f"ERR KV.PREFIX.WARM failed (layer {layer}: {error})") from error


def _load_as_stored(
    engine: AttentionEngine, store: Any, sides: tuple[bytes, bytes], layer: int, rows: int, to: tuple[bytes, int, int]
) -> bool:
    """The same without decoding, where the backend computes with such rows. Whether it does."""
    if not engine.backend.at_once:
        return False
    from pion.attention.metal_rows import Run, StoredSide

    given = []
    for side in sides:
        found = store.v_read_stored(side, layer, 0, rows)
        if found is None or any(run.missing for run in found.runs):
            return False
        runs = [Run(run.fmt, run.start, run.rows, run.nbytes) for run in found.runs]
        given.append(StoredSide(found.theta, runs, functools.partial(_bytes_of, found)))
    sid, heads, dim = to
    return engine.store_rows(sid, layer, heads, dim, rows, *given)


def _bytes_of(found: Any) -> bytearray:
    data = bytearray(found.nbytes)
    Extents(found.segments).readinto(data)
    return data


@functools.cache
def _memory_share() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // limits.ATTEND_MEMORY_SHARE
