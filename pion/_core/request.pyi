from collections.abc import Callable
from typing import Any, Protocol

class _Sink(Protocol):
    def feed(self, data: memoryview) -> object: ...

class Parser:
    def __init__(
        self,
        *,
        max_args: int | None = None,
        max_bulk: int | None = None,
        max_inline: int | None = None,
        max_command: int | None = None,
        big: int | None = None,
        sink: Callable[[list[Any], int], _Sink | None] | None = None,
        unauthenticated: bool = False,
    ) -> None: ...
    @property
    def buffered(self) -> int: ...
    @property
    def memory(self) -> int: ...
    def authenticate(self) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> list[list[Any]]: ...
