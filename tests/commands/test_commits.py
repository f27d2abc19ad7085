"""Commands that wait for the medium share flushes."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from pion.commands.commits import GroupCommit
from pion.errors import StorageError


class Medium:
    """Flushes that last until they are let go; each remembers what had been written when it began."""

    def __init__(self) -> None:
        self.written = 0
        self.began: list[int] = []
        self.go = threading.Semaphore(0)
        self.failing = False

    def commit(self) -> None:
        self.began.append(self.written)
        assert self.go.acquire(timeout=20)
        if self.failing:
            raise StorageError("ERR no")


def context(medium: Medium) -> Any:
    async def in_thread(fn: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(fn, *args)

    server = types.SimpleNamespace(new_event=trio.Event)
    return types.SimpleNamespace(server=server, engine=medium, in_thread=in_thread)


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - a thread makes it true
            await trio.sleep(0.001)


async def test_those_who_ask_meanwhile_share_the_next_flush() -> None:
    medium, commit = Medium(), GroupCommit()
    ctx, answered = context(medium), []

    async def ask(name: int) -> None:
        medium.written += 1
        mine = medium.written
        await commit(ctx)
        assert medium.began[-1] >= mine or any(began >= mine for began in medium.began)
        answered.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 0)
        await until(lambda: medium.began)
        for name in range(1, 100):
            nursery.start_soon(ask, name)
        await until(lambda: medium.written == 100)
        assert answered == []
        medium.go.release()
        await until(lambda: len(medium.began) == 2)
        assert answered == [0]
        medium.go.release()
    assert medium.began == [1, 100]
    assert sorted(answered) == list(range(100))


async def test_everyone_learns_of_a_failure_and_the_next_flush_is_its_own() -> None:
    medium, commit = Medium(), GroupCommit()
    ctx, errors = context(medium), []
    medium.failing = True

    async def ask() -> None:
        try:
            await commit(ctx)
        except StorageError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: medium.began)
        for _ in range(5):
            nursery.start_soon(ask)
        await until(lambda: commit._next is not None)
        medium.go.release(2)
    assert [str(error) for error in errors] == ["ERR no"] * 6
    assert len({id(error) for error in errors}) == 6, "each has its own, or their tracebacks mix"
    medium.failing = False
    medium.go.release()
    await commit(ctx)


@pytest.mark.parametrize("when", ["waiting for its turn", "flushing"])
async def test_the_others_do_not_hang_when_the_first_one_is_cancelled(when: str) -> None:
    medium, commit = Medium(), GroupCommit()
    ctx, answered = context(medium), []
    scope = trio.CancelScope()

    async def first() -> None:
        with scope:
            await commit(ctx)

    async def ask() -> None:
        await commit(ctx)
        answered.append(1)

    async with trio.open_nursery() as nursery:
        if when == "waiting for its turn":
            nursery.start_soon(ask)
            await until(lambda: medium.began)
        nursery.start_soon(first)
        await until(lambda: commit._next is not None or len(medium.began) == 1)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        medium.go.release(10)
    assert len(answered) == (4 if when == "waiting for its turn" else 3)
