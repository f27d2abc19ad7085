"""Stage 2 of `PionPromptCache`: the server, and this process, hold for attention what is stored.

After a prefix was stored, or found, the server loads it from its own store (KV.PREFIX.WARM): K/V cross the wire once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from pion import limits
from pion.client import assembly, caches, transfer
from pion.client.attend import Pinned, raise_refused, session, warm
from pion.client.attend_lanes import VARIABLE
from pion.client.attend_methods import AttendMethods
from pion.client.caches import CacheOptions, Layout, PionMlxCompatError
from pion.client.connection import Flight, Steps
from pion.client.errors import AttendError, LaneError, PrefixMissError
from pion.client.identity import cache_identity
from pion.client.layerwise import LayerMethods
from pion.client.resident import Resident, Residents
from pion.client.slots import tree_kind
from pion.client.transfer import Parts, lines_of
from pion.client.work import Look, Wanted
from pion.errors import AuthenticationError, CommandError, MismatchError
from pion.wire.resp import ReplyError

__all__ = ["Built", "Stage2"]

log = logging.getLogger("pion.client")

_REMEMBERED: Final = 4096  # namespaces whose tokens are known here
_ASK: Final = "get_or_prefill(..., stage2=True) stores and loads it"


@dataclass(frozen=True)
class Held:
    """What the attention engine holds of a namespace.

    Attributes:
        layers: (state, heads, rows, head size) by layer; None where the server does not say.
        first: what LOOKUP said of layer 0.
    """

    layers: dict[int, tuple[str, int, int, int]] | None
    first: str

    def warm(self, count: int | None = None) -> bool:
        """Whether all layers, or as many as are known of, are warm."""
        if self.layers is None:
            return self.first == "HIT"
        wanted = range(count) if count is not None else self.layers.keys()
        return bool(self.layers) and all(self.layers.get(layer, ("MISS",))[0] == "HIT" for layer in wanted)

    def wrong(self, layout: Layout, rows: int) -> str:
        """Why it is not the prefix of so many tokens of this model, as a sentence; empty when it may be."""
        expected = layout.n_kv_heads, rows, layout.head_dim
        if self.layers is None:
            return ""
        for layer in range(len(layout.rows)):
            state, *found = self.layers.get(layer, ("MISS", 0, 0, 0))
            if state == "MISS":
                return f"layer {layer} is missing"
            if tuple(found) != expected:
                return f"layer {layer} has (heads, rows, head size) {tuple(found)}, not {expected}"
        return ""


@dataclass(frozen=True)
class Built:
    """A prompt cache to attend with.

    Attributes:
        namespace: of the prefix, as the server is asked for it.
        cache: the model's own slots; those that are on the server are empty, for the suffix.
        remote: by slot that is on the server, its layer in the session.
        layout: of the model.
    """

    namespace: str
    cache: list[Any]
    remote: dict[int, int]
    layout: Layout


def pinned(namespace: str) -> Steps[str]:
    """The namespace, and the digest of what is stored there now."""
    (info,) = yield Flight([["V.INFO", f"{namespace}_pk"]])
    return Pinned.of(namespace, lines_of(info).get("digest") if isinstance(info, bytes) else None)


def held(namespace: str) -> Steps[Held]:
    """Ask what the attention engine holds."""
    sid = session(namespace)
    info, first = yield Flight([["ATTEND.PREFIX.INFO", sid], ["ATTEND.PREFIX.LOOKUP", sid, 0]])
    raise_refused(first, "ATTEND.PREFIX.LOOKUP")
    if isinstance(info, ReplyError):
        return Held({} if "not found" in str(info) else None, str(first))
    layers = {}
    for name, value in lines_of(info).items():
        state, *sizes = value.split(",")
        heads, rows, dim = (int(size.partition("=")[2]) for size in sizes)
        layers[int(name.removeprefix("layer_"))] = state, heads, rows, dim
    return Held(layers, str(first))


def loaded(namespace: str, layout: Layout, rows: int) -> Steps[Held]:
    """Have the server hold a stored prefix, unless it does.

    Raises:
        AttendError: it computes no attention, or not over heads of this size, or the prefix is not stored.
    """
    if why := _size(layout):
        raise AttendError(why)
    found = yield from held(namespace)
    if not found.warm(len(layout.rows)) or found.wrong(layout, rows):
        yield from warm(namespace, layout.n_kv_heads, layout.head_dim)
        found = yield from held(namespace)
    return found


class Stage2(AttendMethods, LayerMethods):
    """What is done for the attention engine."""

    stage2 = False
    _residents: Residents
    _options: CacheOptions
    _digests: OrderedDict[str, str]

    def after_fork(self) -> None:
        """In a forked child: locks that were held are the parent's."""
        super().after_fork()
        self._attend.after_fork()
        self._residents.after_fork()

    @property
    def cold_rehydrates_observed(self) -> int:
        """Questions that were answered after their K/V, gone for others, were loaded again."""
        return self._attend.cold_rehydrates

    @property
    def attend_query_calls(self) -> int:
        """Questions asked of the server."""
        return self._attend.calls

    @property
    def attend_query_ms_total(self) -> float:
        """Milliseconds spent on them."""
        return self._attend.query_ms_total

    def _named(self, namespace: str) -> str:
        return Pinned.of(namespace, self._digests.get(namespace))

    def attend_drop(self, namespace: str, *more: str) -> int:
        """Free what the server, and this process, hold of these namespaces for attention; how many layers the server
        freed. What is stored of them stays."""
        names = namespace, *more
        self._residents.drop(*names)
        now = [self._run(pinned(name)) for name in names]
        return super().attend_drop(*names, *map(self._named, names), *now)

    # --- beside the steps of a prefix -----------------------------------------------------------------------------

    def _look(self, want: Wanted, layout: Layout) -> Look:
        look = super()._look(want, layout)
        if self.stage2 and look.cache is not None:
            self._load(want, layout)
        return look

    def _stored(self, want: Wanted, layout: Layout) -> None:
        if self.stage2:
            self._load(want, layout)

    def _load(self, want: Wanted, layout: Layout) -> None:
        """Have the server hold a prefix that is stored. What fails costs the use of the server, not the prefix."""
        count = len(want.ids)
        try:
            found = self._link.run(loaded(Pinned.of(want.namespace, want.digest), layout, count))
        except (OSError, CommandError) as error:
            log.warning("prefix %s: the server does not hold it for attention: %s", want.namespace, error)
            return
        why = found.wrong(layout, count)
        if why or not found.warm(len(layout.rows)):
            log.warning(
                "prefix %s: the server holds it for attention in part: %s", want.namespace, why or "cold layers"
            )
        self._attend.remember(want.namespace, count)

    def _hold(self, want: Wanted, layout: Layout, cache: list[Any]) -> None:
        """Keep a prefix in this process, for whoever attends to it here."""
        if not self.stage2:
            return
        with self._counting:
            self._digests[want.namespace] = want.digest
            if len(self._digests) > _REMEMBERED:
                self._digests.popitem(last=False)
        if not self._attend.in_process or self._residents.has(want.namespace, want.digest):
            return
        resident = Resident.of(cache, len(want.ids), want.digest, want.identity)
        if not self._residents.put(want.namespace, resident):
            log.info("prefix %s: %d bytes are more than local_bytes=%d; the server is asked for its attention",
                     want.namespace, resident.nbytes, self._residents.max_bytes)  # fmt: skip

    def _attend_state(self, namespace: str) -> str:
        """What the attention engine has of a namespace: ``warm``, ``cold`` or ``missing``."""
        found: Held = self._run(held(self._run(pinned(namespace))))
        count = len(self.layout.rows) if self.layout is not None else None
        if found.warm(count):
            return "warm"
        states = [layer[0] for layer in found.layers.values()] if found.layers is not None else [found.first]
        return "cold" if len(states) >= (count or 1) and "MISS" not in states else "missing"

    def _holds(self, namespace: str) -> bool:
        """Whether the attention engine has a namespace."""
        try:
            return self._attend_state(namespace) == "warm"
        except AuthenticationError:
            raise
        except (OSError, CommandError) as error:
            log.info("prefix %s: whether the server holds it for attention is not known: %s", namespace, error)
            return False

    # --- caches to attend with ------------------------------------------------------------------------------------

    def _built(self, model: Any, namespace: str, prefix_len: int) -> Built:
        """See `prefix_cache.make_pion_prompt_cache`."""
        layout = self._measured() if model is self.model else caches.inspect_model(model, self._options)
        if not layout.rows:
            raise PionMlxCompatError("no layer of this model, with these options, keeps plain K/V to attend to")
        identity = cache_identity(layout.identity, tree_kind(layout.trees))
        resident = self._residents.get(namespace) if self._attend.in_process else None
        if resident is not None:
            if resident.identity != identity:
                raise MismatchError(f"MISMATCH model: the prefix of {namespace!r} belongs to another model")
            _check_length(namespace, resident.tokens, prefix_len)
            return Built(namespace, resident.cache(model, self._options, layout), {}, layout)
        if self._attend.forced == "process":
            raise LaneError(f"{VARIABLE}=process: this process does not hold {namespace!r}; {_ASK}")
        if why := _size(layout):
            raise PionMlxCompatError(why)
        remote = {place: rank for rank, place in enumerate(layout.rows)}
        cache, name = self._run(self._slots(model, namespace, prefix_len, layout, identity.hex()))
        try:
            found = self._run(loaded(name, layout, prefix_len))
        except AttendError as error:
            raise PrefixMissError(f"the server does not hold {namespace!r} for attention: {error}; {_ASK}") from error
        if why := found.wrong(layout, prefix_len):
            raise PrefixMissError(f"the server does not hold {namespace!r} for attention: {why}; {_ASK}")
        if found.layers is None and found.first != "HIT":
            raise PrefixMissError(f"the server does not hold {namespace!r} for attention; {_ASK}")
        return Built(name, cache, remote, layout)

    def _slots(
        self, model: Any, namespace: str, count: int, layout: Layout, identity: str
    ) -> Steps[tuple[list[Any], str]]:
        """Slots whose rows are elsewhere: windows and recurrent states are fetched, the others are empty. And the
        namespace with the digest that they belong to."""
        entry = yield from transfer.read(namespace)
        if entry is None or entry.manifest is None:
            if layout.is_hybrid:
                raise PrefixMissError(f"{namespace!r} is not stored with the states this model needs; {_ASK}")
            return caches.new_cache(model, self._options), (yield from pinned(namespace))
        if entry.manifest.identity != identity:
            raise MismatchError(f"MISMATCH model: the prefix of {namespace!r} belongs to another model")
        _check_length(namespace, entry.manifest.tokens, count)
        if self._digests.get(namespace, entry.digest) != entry.digest:
            raise MismatchError(f"MISMATCH digest: {namespace!r} holds other tokens than were asked for here")
        nothing = layout.of_rows(0)
        parts: Parts = yield from transfer.fetch(entry, entry.digest or "", nothing, ((), ()), count, count, self.lanes)
        cache = assembly.built(model, self._options, layout, entry.manifest, parts, count, rows=False)
        return cache, Pinned.of(namespace, entry.digest)


def _size(layout: Layout) -> str:
    """Why the server cannot attend to heads of this size, as a sentence; empty when it can."""
    if 0 < layout.head_dim <= limits.ATTEND_MAX_HEAD_DIM and layout.head_dim % limits.ATTEND_HEAD_DIM_STEP == 0:
        return ""
    return f"this model's heads have {layout.head_dim} values; the server attends to {limits.ATTEND_HEAD_DIMS}"


def _check_length(namespace: str, tokens: int, prefix_len: int) -> None:
    if tokens != prefix_len:
        raise ValueError(f"prefix_len={prefix_len}, but {namespace!r} holds {tokens} tokens")
