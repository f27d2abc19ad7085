from typing import Any

from typing_extensions import Buffer

__all__ = ["parameters", "samples"]

def parameters(root: Any, kind: type) -> list[tuple[str, Any]]: ...
def samples(buffers: list[Buffer], count: int, nbytes: int) -> list[bytes]: ...
