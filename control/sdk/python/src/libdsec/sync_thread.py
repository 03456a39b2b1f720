"""The event loop that does the work of `libdsec.sync`, in a thread of its own, and its streams as ordinary iterators."""

from __future__ import annotations

import asyncio
import os
import threading
from types import TracebackType
from typing import Any, AsyncIterator, Coroutine, Generic, Iterable, Iterator, List, Optional, Type, TypeVar, Union

from .command import Input as AsyncInput

T = TypeVar("T")
Input = Union[str, bytes, Iterable[bytes]]


class LoopThread:
    """Started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._thread: Optional[threading.Thread] = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. Interrupted (Ctrl-C) it is cancelled, and what it then still does is awaited."""
        loop = self.loop()
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("libdsec.sync cannot be called from its own thread: not from on_output")
        done = threading.Event()
        tasks: List[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda _: done.set())

        loop.call_soon_threadsafe(begin)
        try:
            done.wait()
        except BaseException:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            done.wait(30)
            raise
        return tasks[0].result()

    def later(self, work: Coroutine[Any, Any, object]) -> None:
        if self._loop is None or not self._loop.is_running():
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="libdsec", daemon=True)
                self._thread.start()
            return self._loop

    def forget(self) -> None:
        """In a child of fork there is no such thread."""
        self._lock = threading.Lock()
        self._loop = None
        self._thread = None


_thread = LoopThread()
run = _thread.run
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.forget)


class Stream(Generic[T]):
    """Iterated once; closing it, or leaving its `with`, ends what is behind it."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        found = run(_next(self._source))
        if not found:
            raise StopIteration
        return found[0]

    def close(self) -> None:
        run(_close(self._source))

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Left in the middle: its connection is given back.
        _thread.later(_close(self._source))


async def _next(source: AsyncIterator[T]) -> List[T]:
    try:
        return [await source.__anext__()]
    except StopAsyncIteration:
        return []


async def _close(source: AsyncIterator[Any]) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


def input_of(data: Input) -> AsyncInput:
    return data if isinstance(data, (str, bytes)) else _iterated(data)


async def _iterated(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    parts = iter(source)
    while True:
        part = await asyncio.to_thread(next, parts, None)
        if part is None:
            return
        yield part
