"""Commands that wait for the medium share flushes."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import trio

from pion.commands.commits import GroupCommit, Later
from pion.errors import INTERNAL, CommandError, StorageError


class Medium:
    """Flushes that last until they are let go; each remembers what had been written when it began."""

    def __init__(self) -> None:
        self.written = 0
        self.began: list[int] = []
        self.go = threading.Semaphore(0)
        self.failure: Exception | None = None

    def commit(self) -> None:
        self.began.append(self.written)
        assert self.go.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure


def context(medium: Medium, nursery: trio.Nursery) -> Any:
    async def in_thread(fn: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(fn, *args)

    server = types.SimpleNamespace(new_event=trio.Event, spawn=nursery.start_soon)
    return types.SimpleNamespace(server=server, engine=medium, in_thread=in_thread)


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - a thread makes it true
            await trio.sleep(0.001)


async def test_those_who_ask_meanwhile_share_the_next_flush() -> None:
    medium, commit = Medium(), GroupCommit()
    answered: list[int] = []

    async with trio.open_nursery() as nursery:
        ctx = context(medium, nursery)

        def ask(name: int) -> None:
            medium.written += 1
            reply = commit.later(ctx, name)
            assert type(reply) is Later
            reply.deliver = answered.append

        ask(0)
        await until(lambda: medium.began)
        for name in range(1, 100):
            ask(name)
        assert answered == []
        medium.go.release()
        await until(lambda: len(medium.began) == 2)
        assert answered == [0]
        medium.go.release()
        await until(lambda: len(answered) == 100)
        ask(100)  # nobody was waiting any more: it starts the next one
        medium.go.release()
    assert medium.began == [1, 100, 101]
    assert answered == list(range(101))


async def test_a_reply_may_be_awaited() -> None:
    medium, commit = Medium(), GroupCommit()
    async with trio.open_nursery() as nursery:
        medium.go.release()
        assert await commit.later(context(medium, nursery), 7) == 7


@pytest.mark.parametrize("failure", [StorageError("ERR no"), OSError(5, "unexpected")])
async def test_everyone_learns_of_a_failure_and_the_next_flush_is_its_own(failure: Exception) -> None:
    medium, commit = Medium(), GroupCommit()
    outcomes: list[Any] = []
    async with trio.open_nursery() as nursery:
        ctx = context(medium, nursery)

        async def ask() -> None:
            try:
                outcomes.append(await commit.later(ctx, "OK"))
            except CommandError as error:
                outcomes.append(error)

        medium.failure = failure
        nursery.start_soon(ask)
        await until(lambda: medium.began)
        for _ in range(5):
            nursery.start_soon(ask)
        await until(lambda: len(commit._waiting) == 5)
        medium.go.release(2)
        await until(lambda: len(outcomes) == 6)
        assert {str(error) for error in outcomes} == {str(failure) if failure.args == ("ERR no",) else INTERNAL}
        assert len({id(error) for error in outcomes}) == 6, "each has its own, or their tracebacks mix"
        medium.failure = None
        medium.go.release()
        assert await commit.later(ctx, "OK") == "OK"
