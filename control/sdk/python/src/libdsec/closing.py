"""An async generator that is closed when its reader leaves, and not some time later: it may hold a connection."""

from __future__ import annotations

from types import TracebackType
from typing import Any, AsyncIterator, Generic, Optional, Type, TypeVar

G = TypeVar("G", bound=AsyncIterator[Any])


class closing(Generic[G]):
    def __init__(self, generator: G) -> None:
        self._generator = generator

    async def __aenter__(self) -> G:
        return self._generator

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        close = getattr(self._generator, "aclose", None)
        if close is not None:
            await close()
