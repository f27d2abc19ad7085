"""The layers of a prefix one by one, as they arrive: the first ones are used while the last ones are on their way.

What arrives belongs together only if the entry is the same behind its rows as before them. That is known at the end: an
iterator that ends without an error, and a lazy cache whose last layer was given out, vouch for all layers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pion.client import transfer
from pion.client.caches import PionMlxCompatError, mlx_modules
from pion.client.connection import Steps
from pion.client.errors import PrefixMissError
from pion.client.namespace import token_array
from pion.client.restore import Restorer
from pion.client.texts import Texts
from pion.errors import MismatchError

__all__ = ["Arrivals", "LayerMethods", "arrived", "arriving", "lazy_cache"]

Ready = Callable[[int, Restorer], None]


def arriving(run: Callable[[Steps[Any]], Any], fetch: Callable[[Ready], Steps[Any]]) -> Iterator[tuple[int, Any, Any]]:
    """Fetch in a thread of its own.

    Args:
        run: runs a procedure on a connection, blocking.
        fetch: the procedure, given what to call for each layer that is complete.

    Yields:
        (layer, K, V), as in `Restorer.finish`.

    Raises:
        What the fetch raises, in place of the next layer.
    """
    arrived: queue.SimpleQueue[tuple[int, Restorer] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            run(fetch(lambda layer, restorer: arrived.put((layer, restorer))))
        except BaseException as error:  # handed to the caller below
            arrived.put(error)
        else:
            arrived.put(None)

    thread = threading.Thread(target=work, name="pion layers", daemon=True)
    thread.start()
    try:
        while (item := arrived.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            layer, restorer = item
            yield layer, *restorer.take(layer)
    finally:
        thread.join()


class Arrivals:
    """Layers on their way, for whoever asks for one of them.

    Args:
        layers: of `arriving`, in any order.
        count: how many there are.
    """

    def __init__(self, layers: Iterator[tuple[int, Any, Any]], count: int) -> None:
        self._layers, self._count = layers, count
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Any, Any]] = {}
        self._given = 0
        self._error: BaseException | None = None

    def take(self, layer: int) -> tuple[Any, Any]:
        """(K, V) of a layer, once; waits for it. With the last one that is taken, all of them are known to be right.

        Raises:
            IncompleteError, OSError, ...: what the fetch raised; for every layer from then on.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                while layer not in self._waiting:
                    number, keys, values = next(self._layers)
                    self._waiting[number] = keys, values
                self._given += 1
                if self._given == self._count:
                    for _ in self._layers:  # its end says that everything was of one entry
                        raise AssertionError("more layers than there are")
            except BaseException as error:
                self._error = error
                raise
            return self._waiting.pop(layer)


def lazy_cache(arrivals: Arrivals, layers: int, count: int) -> list[Any]:
    """A prompt cache whose layers wait for their rows when the model first asks for them.

    Each layer becomes a plain ``KVCache`` of `count` tokens at that moment.
    """
    _, module = mlx_modules()
    plain = module.KVCache

    def arrive(self: Any) -> None:
        keys, values = arrivals.take(self.__dict__["_layer"])
        del self.__dict__["_layer"]
        self.__class__ = plain
        self.keys, self.values = keys, values

    def attribute(name: str) -> property:
        def get(self: Any) -> Any:
            arrive(self)
            return getattr(self, name)

        def put(self: Any, value: Any) -> None:
            arrive(self)
            setattr(self, name, value)

        return property(get, put)

    def reduced(self: Any, protocol: Any) -> Any:
        arrive(self)  # a copy holds rows, and does not wait for those that this one takes
        return self.__reduce_ex__(protocol)

    members = {"keys": attribute("keys"), "values": attribute("values"), "__reduce_ex__": reduced}
    pending: Any = type("KVCache", (plain,), members)
    cache = []
    for layer in range(layers):
        item = pending.__new__(pending)
        item.__dict__.update(_layer=layer, offset=count)
        cache.append(item)
    return cache


def arrived(cache: Any) -> Any:
    """A prompt cache; layers of a lazy one are waited for.

    Raises:
        IncompleteError, OSError: they did not arrive.
    """
    if isinstance(cache, list | tuple):
        for layer in cache:
            if "_layer" in getattr(layer, "__dict__", {}):
                _ = layer.keys
    return cache


class LayerMethods(Texts):
    """What gives the layers of a prefix one by one."""

    def iter_layers(self, prefix_token_ids: Any, namespace: str) -> Iterator[tuple[int, Any, Any]]:
        """The layers of a stored prefix as they arrive, so that the first ones can be used while others travel.

        Yields:
            (layer, K, V): mlx arrays (1, heads, tokens + 256, head_dim) that belong to the caller. What was yielded is
            right once the iterator has ended without an error, and not before.

        Raises:
            PrefixMissError: the server does not hold these tokens.
            MismatchError: it holds others under this name.
            PionMlxCompatError: not every layer of the model has a plain KVCache.
            IncompleteError: the prefix was replaced meanwhile: nothing that was yielded may be used.
        """
        layout = self._layout()
        if layout.is_hybrid or self._as_states:
            raise PionMlxCompatError("layers come one by one only where every layer has a plain KVCache")
        want = self._wanted(prefix_token_ids, namespace, layout)
        offer = self.lanes.may_offer(namespace, want.digest)
        found = self._run(transfer.lookup(namespace, want.digest, describe=True, offer=offer))
        if found.outcome == "mismatch":
            raise MismatchError(found.reason)
        if found.entry is None:
            raise PrefixMissError(f"prefix {namespace!r} is not stored")
        entry, count, rows = found.entry, len(want.ids), layout.of_rows(len(layout.rows))
        formats = transfer.formats_of(entry.infos, want.digest, rows, count, self._sides(layout, rows.cache_len))
        self._count(hits=1)
        return arriving(
            self._run,
            lambda ready: self.lanes.fetch(
                namespace, want.digest, entry.infos, formats, rows, count, ready, offer=entry.offer
            ),
        )

    def lazy(self, prefix_token_ids: Any, namespace: str) -> list[Any]:
        """The prompt cache of a stored prefix, at once: each layer waits for its rows when the model asks for them.

        The last layer that the model asks for also waits until it is known that all of them belong together, so a pass
        of the model that ends has used the right ones.

        Raises:
            PrefixMissError: the server does not hold these tokens.
            IncompleteError, OSError: out of the model's pass: rows did not arrive, or were replaced meanwhile.
        """
        layers = self.iter_layers(prefix_token_ids, namespace)
        count = len(self._layout().rows)
        return lazy_cache(Arrivals(layers, count), count, len(token_array(prefix_token_ids)))
