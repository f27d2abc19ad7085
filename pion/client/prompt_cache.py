"""`PionPromptCache`: a prompt cache for mlx-lm that other processes have already filled.

    pc = PionPromptCache(model)
    cache = pc.get_or_prefill(prefix_ids, namespace=ns)
    text = generate(model, tok, prompt=suffix_ids, prompt_cache=cache)

The first process that asks for a prefix computes and stores it; every later one, on any machine, after any restart,
fetches it. What is fetched is checked against a digest of the tokens and the model. Of a prefix that is stored in part,
or beside another one that begins alike, what is the same is fetched and the rest is computed. A server that is down
costs only the saving: the prefix is computed locally, which is said once.
"""

from __future__ import annotations

import logging
import os
import ssl as tls
import sys
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final, Literal

from pion.client import assembly, caches, calls, flights, progress
from pion.client.address import Address
from pion.client.arguments import check_arguments, checked_checkpoints, checked_wait, text_namespace
from pion.client.attend_lanes import AttendLanes
from pion.client.caches import CacheOptions, Layout, PionMlxCompatError, Prefilled
from pion.client.explain import Explanation, explain
from pion.client.formats import Formats
from pion.client.lanes import Lanes
from pion.client.layerwise import arrived
from pion.client.link import Link
from pion.client.local import DEFAULT_BYTES
from pion.client.namespace import make_namespace, token_array
from pion.client.raw import RawCommands
from pion.client.resident import Residents
from pion.client.stage2 import Stage2
from pion.client.work import Checkpoints, Wanted
from pion.errors import MismatchError
from pion.limits import DEFAULT_PORT

__all__ = ["PionPromptCache"]

log = logging.getLogger("pion.client")

_OBSERVED_MAX: Final = 65_536  # namespaces whose misses are counted for admission_threshold


class PionPromptCache(Stage2):
    """Fetches a prefix's K/V and state from a Pion server, or computes and stores it.

    Args:
        model: an mlx-lm model. None gives a client for `lookup`, `drop`, `save`, `commit` and raw commands that needs
            no mlx.
        vquant: the stored format of plain K/V. ``"fp16"`` keeps fp16 and bf16 models word for word and rounds fp32
            models to fp16; ``"native"`` is lossless for all; the quantized ones are smaller and cost some of the
            answer's likeness: ``"int8"``, ``"fp8"``, ``"mlx4g32"``, ``"turbo4"``, ``"turbo3"``, ``"turbo2"``; see
            docs/quality.md. Everything else a model keeps (recurrent states, windows, quantized caches) is stored bit
            for bit.
        host, port: the server; a host that starts with ``/`` is a Unix socket.
        stage2: also have the server hold what is stored for attention, and this process what it computed or fetched,
            for `make_pion_prompt_cache` and the ``attend_*`` methods; see docs/attention.md.
        admission_threshold: the n-th miss of a namespace in this process is the first one stored; 1 = store at once.
        boundary_protect: V of so many layers at either end is kept in fp16, and K of all layers, where vquant is a
            quantized format; with `k_format`, K has that format but for the same layers.
        prefill_chunk_size: tokens per forward pass when computing; None = one pass.
        softmax_bitexact: store plain K/V bit for bit too, beside the states of a hybrid model, whatever vquant is.
        k_format, v_format: stored formats of K and of V, instead of vquant.
        url: ``pion://user:password@host:port`` and the like instead of host and port; see ``Address.of``.
        username, password: credentials; else ``$PION_USERNAME`` and ``$PION_PASSWORD``.
        ssl: True or an ``ssl.SSLContext``.
        on_mismatch: what to do when the namespace holds other tokens, another model or another format: ``"raise"``,
            ``"recompute"`` (leave the stored one alone; what its tokens share with those asked for is reused) or
            ``"replace"``.
        background_store: return from a cold `get_or_prefill` while the rows are still being sent. Every later call of
            this object waits for them; other processes may miss until then.
        timeout: seconds without progress after which the server counts as down; None: the URL's, else 60.
        kv_bits, kv_group_size: keep plain K/V as mlx-lm's ``QuantizedKVCache``, as its ``generate`` does with
            ``quantized_kv_start=0``.
        max_kv_size: tokens of a ``RotatingKVCache``, for models that do not make their own cache, as in mlx-lm.
        checkpoints: for models whose state cannot be cut (recurrent layers, windows): numbers of tokens, or a step, at
            which the state is stored besides at the end. A prompt that parts from a stored one is computed from the
            last of these before the difference.
        progress: called with (tokens done, tokens in all) after each pass of a prefill. None: a bar of tqdm for long
            ones, where tqdm is installed and stderr is a terminal.
        wait: seconds to wait at most for another thread or process that is computing the same prefix; None: no limit.
        local_bytes: memory for copies of prefixes that this process uses again and again; 0 or
            ``PION_PROMPT_CACHE_NO_INPROC=1`` in the environment keeps none.
        scope: prefixes are reused under other names of the same scope only. The model, its options and formats belong
            to it by themselves; a text sets apart what they do not show, such as an edit of single rows of a weight.

    Raises:
        ImportError: a model was given but mlx or mlx-lm is missing.
        PionMlxCompatError: the model keeps its state in a class that is not known how to store, named; nothing was
            sent.
        ValueError: an argument is not offered; the text says which.

    A namespace names one token sequence for one model and format: build it with `make_namespace`. The object may be
    shared between threads. It may be kept over a fork: `lookup` without tokens, `drop`, `commit`, `save` and raw
    commands then work in the child. Whatever needs mlx is refused there with PionMlxCompatError if the parent had used
    it, since mlx itself hangs in such a child: start workers with ``multiprocessing.get_context("spawn")``.
    """

    make_namespace = staticmethod(make_namespace)

    def __init__(
        self,
        model: Any = None,
        vquant: str = "fp16",
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        stage2: bool = False,
        admission_threshold: int = 1,
        boundary_protect: int = 0,
        prefill_chunk_size: int | None = None,
        softmax_bitexact: bool = False,
        *,
        k_format: str | None = None,
        v_format: str | None = None,
        url: str | None = None,
        username: str | None = None,
        password: str | None = None,
        ssl: bool | tls.SSLContext | None = None,
        on_mismatch: Literal["recompute", "replace", "raise"] = "raise",
        background_store: bool = False,
        timeout: float | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        max_kv_size: int | None = None,
        checkpoints: Checkpoints = None,
        progress: progress.Progress | None = None,
        wait: float | None = 120.0,
        local_bytes: int = DEFAULT_BYTES,
        scope: str = "",
    ) -> None:
        if stage2 and softmax_bitexact:
            raise ValueError("stage2=True attends to rows; softmax_bitexact=True stores none")
        check_arguments(
            host, port, vquant, prefill_chunk_size,
            admission_threshold=admission_threshold, boundary_protect=boundary_protect, local_bytes=local_bytes,
        )  # fmt: skip
        if not isinstance(scope, str):
            raise TypeError(f"scope must be a str, not {type(scope).__name__}")
        formats = Formats.of(vquant, k_format, v_format, boundary_protect)
        if on_mismatch not in ("recompute", "replace", "raise"):
            raise ValueError(f"on_mismatch must be 'recompute', 'replace' or 'raise', not {on_mismatch!r}")
        where: dict[str, Any] = {} if url else {"path": host} if host.startswith("/") else {"host": host, "port": port}
        if timeout is not None:
            where["timeout"] = timeout
        known = os.environ.get("PION_PASSWORD")
        if username is not None and password is None:
            password = known
        address = Address.of(url, **where, ssl=ssl, username=username, password=password, protocol=2)
        if address.password is None and known:
            address = replace(address, username=os.environ.get("PION_USERNAME") or None, password=known)
        if address.timeout is not None and address.timeout < address.connect_timeout:
            address = replace(address, connect_timeout=address.timeout)

        options = CacheOptions(kv_bits, kv_group_size, max_kv_size)
        chunk = prefill_chunk_size or None
        super().__init__(
            Link(address),
            Lanes(address, local_bytes),
            formats,
            options,
            as_states=softmax_bitexact,
            chunk=chunk,
            wait=checked_wait(wait),
        )
        self.model = model
        self.vquant = vquant
        self.admission_threshold = max(1, admission_threshold)
        self.on_mismatch = on_mismatch
        self.background_store = background_store
        self.checkpoints = checked_checkpoints(checkpoints)
        self.progress = progress
        self._apart = scope
        self.layout = None if model is None else caches.inspect_model(model, options)
        if self.layout is not None:
            if self.layout.rows:
                self.formats.check(self.layout.dtype, len(self.layout.rows), self.layout.kv_dim)
            if stage2 and not self.layout.rows:
                raise PionMlxCompatError("stage2=True: no layer of this model, with these options, keeps plain K/V")
        self.stage2 = bool(stage2)
        self._attend = AttendLanes(address, self._link.run)
        self._residents = Residents(self.lanes.local.max_bytes)
        self._digests = OrderedDict()
        self.address = address
        self._pool = self._link.pool
        self.resp = RawCommands(self._pool)
        self.admission_skips = 0
        self._observed: OrderedDict[str, int] = OrderedDict()

    # --- the prefix -----------------------------------------------------------------------------------------------

    def get_or_prefill(self, prefix_token_ids: Any, namespace: str, *, checkpoints: Checkpoints = None) -> list[Any]:
        """The prompt cache of a prefix: fetched when the server has it, else computed here and stored.

        What another stored prefix of this model has in common with it is fetched, and only the rest is computed; see
        `stats` and `explain` for how much that was.

        Args:
            prefix_token_ids: a flat sequence of token ids, at least one.
            namespace: the key, see `make_namespace`.
            checkpoints: instead of the constructor's.

        Returns:
            What ``mlx_lm.models.cache.make_prompt_cache(model)`` returns, holding exactly the prefix. It belongs to
            the caller alone.

        Raises:
            RuntimeError: this object has no model.
            MismatchError: the namespace holds something else and ``on_mismatch="raise"``; nothing was computed.
            AuthenticationError: credentials are missing, wrong, or not enough.
            ssl.SSLError: TLS failed.
            CommandError: the server refused the lookup for another reason.
        """
        layout = self._layout()
        want = self._wanted(prefix_token_ids, namespace, layout)
        given = checkpoints if checkpoints is not None else self.checkpoints
        cache = self._obtained(want, layout, self._boundaries(given, layout, len(want.ids)))
        self._hold(want, layout, cache)
        return cache

    def _obtained(self, want: Wanted, layout: Layout, boundaries: list[int]) -> list[Any]:
        namespace = want.namespace
        look = self._look(want, layout)
        if look.cache is not None:
            return look.cache
        if look.outcome == "mismatch":
            self._mismatch(namespace, look.reason)
        missing = look.outcome == "miss"
        own = [] if missing else [namespace]
        stores = missing or (look.outcome == "mismatch" and self.on_mismatch == "replace")
        if look.outcome == "down":
            return self._compute(want, layout, [], boundaries, look.reason).cache
        if not self._admitted(namespace) or not stores:
            return self._compute(want, layout, None, boundaries, look.reason, own).cache

        key = (str(self.address), namespace, want.digest)
        holder = flights.Holder(sys._getframe())
        claim = self._new_claim(namespace, holder)
        turn, ours = flights.begin(key, holder)
        try:
            if not ours:
                self._count(waits=1)
                if turn.wait(self._wait_at_most):
                    look = self._look(want, layout)
                    if look.cache is not None:
                        return look.cache
                return self._compute(want, layout, None, boundaries, look.reason, own).cache
            cache, near = self._claim(want, layout, claim, missing=missing and not look.reason)
            if cache is not None:
                flights.end(key, turn, stored=True)
                return cache
            done = self._compute(want, layout, near, boundaries, look.reason, own)
            self._kept(want, layout, done, claim, lambda stored: flights.end(key, turn, stored))
            return done.cache
        finally:
            if ours and holder.thread is None:  # else the thread that stores it gives both back
                flights.end(key, turn, stored=False)
                self._release(claim)
            holder.leave()

    def _kept(self, want: Wanted, layout: Layout, done: Prefilled, claim: Any, over: Any) -> None:
        try:
            self._store(want, layout, done, replace=self.on_mismatch == "replace", claim=claim, over=over)
        except MismatchError as error:  # meanwhile, or incompletely, something else is stored: the K/V here is right
            self._mismatch(want.namespace, str(error), computed=True)

    def put(self, cache: list[Any], prefix_token_ids: Any, namespace: str) -> bool:
        """Store a prompt cache that the caller has already, e.g. after mlx-lm's ``generate`` went on with one.

        Args:
            cache: of this model, with the options of this object; it is read, and the caller keeps it.
            prefix_token_ids: what it holds, exactly. A recurrent state does not know its tokens: it is the caller who
                says what they are.
            namespace: the key.

        Returns:
            Whether it is stored; the log says why not.

        Raises:
            ValueError: the cache holds another number of tokens, or none.
            PionMlxCompatError: it is another kind of cache, named; nothing was sent.
            MismatchError: the namespace holds something else and ``on_mismatch="raise"``.
        """
        layout = self._layout()
        want = self._wanted(prefix_token_ids, namespace, layout)
        assembly.checked(arrived(cache), layout, len(want.ids))
        found = self._ask(namespace, want.digest)
        if found.outcome == "mismatch":
            self._mismatch(namespace, found.reason, done="given")
        if found.outcome == "hit" or found.outcome == "down" or (found.outcome, self.on_mismatch) == (
            "mismatch", "recompute"
        ):  # fmt: skip
            if found.outcome == "hit":
                self._stored(want, layout)
            return found.outcome == "hit"
        stored: list[bool] = []
        replacing = self.on_mismatch == "replace"
        self._store(want, layout, Prefilled(cache), replace=replacing, claim=None, over=stored.append)
        self._join()
        return stored == [True]

    def lookup(self, namespace: str, prefix_token_ids: Any = None) -> bool:
        """Whether the server holds all of a namespace.

        Args:
            namespace: the key.
            prefix_token_ids: when given (and there is a model), also whether it is that of these tokens.

        With ``stage2`` also whether it holds all of it for attention.

        Returns:
            False when it does not, holds something else, or cannot be reached.

        Raises:
            AuthenticationError, CommandError, ssl.SSLError: the server refused the question.
        """
        digest = None
        text_namespace(namespace)
        if prefix_token_ids is not None:
            digest = self._want(token_array(prefix_token_ids), namespace, self._layout()).digest
        return self._ask(namespace, digest).outcome == "hit" and (not self.stage2 or self._holds(namespace))

    def explain(self, prefix_token_ids: Any, namespace: str) -> Explanation:
        """Why `get_or_prefill` would fetch these tokens or compute them: how many are asked for, stored, shared and
        reused, where the first difference lies, and a sentence. Nothing is fetched, computed or counted.

        Raises:
            RuntimeError: this object has no model.
            OSError, CommandError: the server cannot be asked.
        """
        layout = self._layout()
        want = self._want(token_array(prefix_token_ids), text_namespace(namespace), layout)
        own = self.on_mismatch != "raise"
        identity = want.identity.hex()
        said = self._run(explain(namespace, want.digest, want.ids, identity, layout, want.near, own=own))
        if self.stage2:
            said["attend"] = self._attend_state(namespace)
        return said

    def drop(self, *namespaces: str) -> int:
        """Delete prefixes on the server and here; returns how many of them the server held."""
        self.lanes.local.drop(*namespaces)
        self._residents.drop(*namespaces)
        return int(self._run(calls.drop(namespaces)))

    def commit(self) -> None:
        """Return once everything stored so far would survive a power loss."""
        self._run(calls.commit())

    def save(self, path: str | None = None) -> None:
        """`commit` and an index checkpoint; with `path`, a copy of the store in the server's data directory."""
        self._run(calls.save(path))

    def stats(self) -> dict[str, Any]:
        """What this object did so far: counts, and milliseconds spent fetching, storing and prefilling.

        ``partial_hits`` are misses of which a part was fetched; ``tokens_asked`` and ``tokens_reused`` count tokens
        over all calls; ``last`` is the receipt of the last one (see `explain`); ``waits`` are calls that waited for
        somebody who was computing the same; ``attend`` says which way questions about attention took, and why not
        another.
        """
        with self._counting:
            asked = self.hits + self.misses
            return {
                "hits": self.hits,
                "misses": self.misses,
                "hit_rate": self.hits / asked if asked else 0.0,
                "admission_skips": self.admission_skips,
                "admission_threshold": self.admission_threshold,
                "fetch_ms_total": self.fetch_ms_total,
                "store_ms_total": self.store_ms_total,
                "last_prefill_ms": self.last_prefill_ms,
                "mismatches": self.mismatches,
                "outages": self.outages,
                "store_errors": self.store_errors,
                "partial_hits": self.partial_hits,
                "tokens_asked": self.tokens_asked,
                "tokens_reused": self.tokens_reused,
                "waits": self.waits,
                "lanes": dict(self.lanes.used),
                "attend": self._attend.described(),
                "last": dict(self._last) if self._last is not None else None,
            }

    def __repr__(self) -> str:
        model = "no model" if self.model is None else type(self.model).__module__.rpartition(".")[2]
        return f"<PionPromptCache {model}, {self.vquant}, {self.address}>"

    def close(self) -> None:
        """Wait for a background store and close the connections. The object cannot be used afterwards."""
        self._join()
        self._attend.close()
        self._link.close()

    def __enter__(self) -> PionPromptCache:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- policy ---------------------------------------------------------------------------------------------------

    def _mismatch(self, namespace: str, reason: str, *, computed: bool = False, done: str = "computed") -> None:
        self._count(mismatches=1)
        if self.on_mismatch == "raise" and not computed:
            raise MismatchError(
                f"{reason} (namespace {namespace!r}; on_mismatch='recompute' leaves it alone, 'replace' overwrites it)"
            )
        if self.on_mismatch == "replace":
            what = f"it is {done} and replaces that"
        elif computed or done != "computed":
            what = "it is not stored"
        else:
            what = "it is not stored; what it does not share with that or with other stored prefixes is computed"
        log.warning("prefix %s: %s; %s", namespace, reason, what)

    def _admitted(self, namespace: str) -> bool:
        with self._counting:
            seen = self._observed[namespace] = self._observed.pop(namespace, 0) + 1
            if len(self._observed) > _OBSERVED_MAX:
                self._observed.popitem(last=False)
            if seen < self.admission_threshold:
                self.admission_skips += 1
            return seen >= self.admission_threshold
