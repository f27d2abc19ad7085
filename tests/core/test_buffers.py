"""Pooled memory comes back when its last view is gone, and only then."""

import numpy as np
import pytest

from pion._core.buffers import BufferPool

MIB = 1 << 20


def test_a_buffer_returns_when_the_last_view_of_it_is_gone() -> None:
    pool = BufferPool()
    array = np.frombuffer(memoryview(pool.take(5 * MIB)), np.uint8)
    assert array.nbytes == 5 * MIB
    array = array.reshape(5, -1)
    row = array[2]
    row[:] = 7
    del array
    assert pool.idle == 0
    assert row.min() == row.max() == 7
    del row
    assert pool.idle == 6 * MIB  # whole huge pages


def test_memory_is_reused_for_sizes_that_fit_well() -> None:
    pool = BufferPool()
    address = np.frombuffer(memoryview(pool.take(8 * MIB)), np.uint8).ctypes.data
    assert np.frombuffer(memoryview(pool.take(5 * MIB)), np.uint8).ctypes.data == address
    assert np.frombuffer(memoryview(pool.take(1 * MIB)), np.uint8).ctypes.data != address
    assert pool.idle == 10 * MIB


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(max_idle=8 * MIB)
    held = [pool.take(4 * MIB) for _ in range(4)]
    held.clear()
    assert pool.idle == 8 * MIB
    many = BufferPool()
    held = [many.take(1) for _ in range(40)]
    held.clear()
    assert many.idle <= 16 * 2 * MIB


def test_a_buffer_outlives_its_pool() -> None:
    pool = BufferPool()
    buffer = pool.take(100)
    del pool
    view = memoryview(buffer)
    view[:3] = b"abc"
    assert bytes(view[:3]) == b"abc"
    assert len(buffer) == len(view) == 100


def test_sizes_at_the_edge() -> None:
    assert len(memoryview(BufferPool().take(0))) == 0
    with pytest.raises(ValueError, match="negative"):
        BufferPool().take(-1)
    with pytest.raises(MemoryError):
        BufferPool().take(1 << 62)
