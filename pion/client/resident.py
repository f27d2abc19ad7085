"""Prompt caches of prefixes that this process computed or fetched, kept for stage 2: attention asks no server then.

mlx is imported inside functions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from pion.client import caches, slots
from pion.client.caches import CacheOptions, Layout
from pion.client.payload import Tensor
from pion.client.restore import ROOM

__all__ = ["Resident", "Residents"]


@dataclass(frozen=True)
class Resident:
    """A prefix that is held.

    Attributes:
        digest: of its tokens and the model.
        identity: of the model and its kind of cache.
        tokens: how many.
        states: of each leaf of its cache, copies of its arrays.
        nbytes: of them.
    """

    digest: str
    identity: bytes
    tokens: int
    states: list[slots.State]
    nbytes: int

    @classmethod
    def of(cls, cache: list[Any], tokens: int, digest: str, identity: bytes) -> Resident:
        """Copy a cache, which its caller goes on with."""
        states = [_copied(slots.take(leaf)) for leaf in slots.leaves(cache)]
        nbytes = sum(tensor.words.nbytes for state in states for tensor in state.tensors.values())
        return cls(digest, identity, tokens, states, nbytes)

    def cache(self, model: Any, options: CacheOptions, layout: Layout) -> list[Any]:
        """A prompt cache of the prefix that belongs to the caller alone."""
        mx, _ = caches.mlx_modules()
        cache = caches.new_cache(model, options)
        arrays: list[Any] = []
        for number, (leaf, state) in enumerate(zip(slots.leaves(cache), self.states, strict=True)):
            arrays += slots.give(leaf, state, None, ROOM, layout.shapes[number] if layout.shapes else None)
        mx.eval(arrays)
        return cache


def _copied(state: slots.State) -> slots.State:
    tensors = {name: Tensor(tensor.dtype, np.array(tensor.words)) for name, tensor in state.tensors.items()}
    return slots.State(state.name, state.numbers, tensors, state.absent)


class Residents:
    """The prefixes held by namespace; the least recently used goes first. Any thread.

    Args:
        max_bytes: of all of them; 0 holds none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Resident] = OrderedDict()

    def after_fork(self) -> None:
        """In a forked child: a lock that was held is the parent's."""
        self._lock = threading.Lock()

    def get(self, namespace: str) -> Resident | None:
        """What is held of a namespace."""
        with self._lock:
            held = self._held.get(namespace)
            if held is not None:
                self._held.move_to_end(namespace)
            return held

    def has(self, namespace: str, digest: str) -> bool:
        """Whether this prefix is held."""
        held = self.get(namespace)
        return held is not None and held.digest == digest

    def put(self, namespace: str, resident: Resident) -> bool:
        """Hold a prefix instead of what the namespace held; whether there is room for it."""
        with self._lock:
            self._remove(namespace)
            if not 0 < resident.nbytes <= self.max_bytes:
                return False
            self._held[namespace] = resident
            self.nbytes += resident.nbytes
            while self.nbytes > self.max_bytes:
                self._remove(next(iter(self._held)))
            return True

    def drop(self, *namespaces: str) -> None:
        """Let go of these."""
        with self._lock:
            for namespace in namespaces:
                self._remove(namespace)

    def _remove(self, namespace: str) -> None:
        held = self._held.pop(namespace, None)
        if held is not None:
            self.nbytes -= held.nbytes
