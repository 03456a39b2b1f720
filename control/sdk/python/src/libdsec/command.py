"""A command in a sandbox.

It goes on without whoever started it; its output is kept by the service and read from any offset, so that a connection that is lost costs time,
not output: reading goes on where it was, nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from types import TracebackType
from typing import Any, AsyncGenerator, AsyncIterable, AsyncIterator, Callable, List, Mapping, Optional, Type, Union

from .closing import closing
from .command_result import Collector, CommandResult, ExecResult
from .errors import CommandFailed, DSecError, connection_lost
from .output_frames import OutputPart, offset_of, only_new, parse_frames
from .transport import BackOff, Transport, body_of, within

OUTPUT_LIMIT_BYTES = 64 << 20
#: Of one request: small enough that the service can put it on record.
INPUT_BYTES = 256 << 10
Input = Union[str, bytes, AsyncIterable[bytes]]
OnOutput = Callable[[OutputPart], Any]


@dataclass(frozen=True)
class CommandView:
    id: int
    args: Optional[List[str]]
    started_ms: Optional[float]
    running: bool
    result: Optional[ExecResult]

    @staticmethod
    def of(view: Mapping[str, Any]) -> CommandView:
        result = view.get("result")
        return CommandView(
            id=view["id"],
            args=view.get("args"),
            started_ms=view.get("startedMs"),
            running=view.get("running", result is None),
            result=None if result is None else ExecResult.of(result),
        )


class Command:
    def __init__(self, transport: Transport, sandbox_path: str, id: int, ended: Optional[ExecResult] = None) -> None:
        self._transport = transport
        self.id = id
        self._path = f"{sandbox_path}/commands/{id}"
        self._ended = ended
        self._lock: Optional[asyncio.Lock] = None

    @property
    def result(self) -> Optional[ExecResult]:
        """None while it runs, as far as it is known here."""
        return self._ended

    async def view(self, *, timeout: Optional[float] = None) -> CommandView:
        """What it is now."""
        view = CommandView.of(await self._transport.json("GET", self._path, timeout=timeout))
        self._ended = view.result or self._ended
        return view

    async def output(
        self,
        *,
        stdout: Union[int, bool] = 0,
        stderr: Union[int, bool] = 0,
        follow: bool = True,
    ) -> AsyncGenerator[OutputPart, None]:
        """Both streams as they come, to the end of the command; over connections that break.

        `stdout`, `stderr`: the offset to begin at; False leaves the stream out. `follow=False`: what there is now.
        """
        at = {"stdout": offset_of(stdout), "stderr": offset_of(stderr)}
        back_off = BackOff(self._transport.patience)
        while True:
            try:
                query = {**at, "follow": None if follow else False}
                response = await self._transport.once("GET", f"{self._path}/output", query=query)
                async with closing(body_of(response)) as body:
                    async for news in parse_frames(body):
                        back_off.progress()
                        if isinstance(news, ExecResult):
                            self._ended = news
                            return
                        if isinstance(news, DSecError):
                            raise news
                        for part in only_new(news, at):
                            yield part
                if not follow:
                    return
                raise connection_lost("output that ends without a result")
            except DSecError as error:
                await back_off.after(error)

    async def stream(self, name: str = "stdout") -> AsyncGenerator[bytes, None]:
        """The bytes of one stream. What the service had to drop is left out: `output` tells of it."""
        parts = self.output(stdout=name == "stdout" and 0, stderr=name == "stderr" and 0)
        async with closing(parts):
            async for part in parts:
                if part.data:
                    yield part.data

    async def wait(self, *, timeout: Optional[float] = None) -> ExecResult:
        """Its end; what it writes is not read. Giving up leaves it running."""
        if self._ended is None:
            await within(timeout, self._to_end())
        assert self._ended is not None
        return self._ended

    async def collect(
        self,
        *,
        check: bool = False,
        output_limit: int = OUTPUT_LIMIT_BYTES,
        on_output: Optional[OnOutput] = None,
        timeout: Optional[float] = None,
    ) -> CommandResult:
        """Its end, with all that it wrote: of each stream at most `output_limit` bytes, beginning and end together. Giving up leaves it running."""
        streams = {"stdout": Collector(output_limit), "stderr": Collector(output_limit)}

        async def read() -> None:
            async with closing(self.output()) as parts:
                async for part in parts:
                    if part.missing_bytes:
                        streams[part.stream].skip(part.missing_bytes)
                    else:
                        streams[part.stream].add(part.data)
                    if on_output is not None:
                        told = on_output(part)
                        if inspect.isawaitable(told):
                            await told

        await within(timeout, read())
        end = self._ended
        assert end is not None
        stdout, stdout_missing = streams["stdout"].collected()
        stderr, stderr_missing = streams["stderr"].collected()
        result = CommandResult(
            exit_code=end.exit_code,
            signal=end.signal,
            timed_out=end.timed_out,
            out_of_memory=end.out_of_memory,
            duration_ms=end.duration_ms,
            stdout_raw=stdout,
            stderr_raw=stderr,
            stdout_missing_bytes=stdout_missing,
            stderr_missing_bytes=stderr_missing,
        )
        if check and not result.ok:
            raise CommandFailed(result)
        return result

    async def write(self, data: Input, *, timeout: Optional[float] = None) -> None:
        """Input, in the order of the calls. Returns when the service has taken it: a command that does not read holds it up."""
        async with self._writing:
            async for piece in pieces_of(data):
                await self._stdin(piece, False, timeout)

    async def close_stdin(self, *, timeout: Optional[float] = None) -> None:
        """The end of its input."""
        async with self._writing:
            await self._stdin(b"", True, timeout)

    async def signal(self, signal: str, *, timeout: Optional[float] = None) -> None:
        """To its process group: `SIGINT`, `SIGTERM`, ..."""
        await self._transport.json("POST", f"{self._path}/signal", body={"signal": signal}, timeout=timeout)

    async def kill(self, *, timeout: Optional[float] = None) -> None:
        """SIGKILL to all that it has started."""
        await self._transport.json("POST", f"{self._path}/kill", timeout=timeout)

    async def resize(self, rows: int, columns: int, *, timeout: Optional[float] = None) -> None:
        body = {"rows": rows, "columns": columns}
        await self._transport.json("POST", f"{self._path}/resize", body=body, timeout=timeout)

    async def __aenter__(self) -> Command:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        """Ends it, if it still runs."""
        if self._ended is None:
            await end_quietly(self)

    @property
    def _writing(self) -> asyncio.Lock:
        # Made where it is used first: before Python 3.10 it belongs to the loop that it is made in.
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _to_end(self) -> None:
        async with closing(self.output(stdout=False, stderr=False)) as parts:
            async for _ in parts:
                pass

    async def _stdin(self, data: bytes, close: bool, timeout: Optional[float]) -> None:
        await self._transport.json("POST", f"{self._path}/stdin", query={"close": close}, data=data, timeout=timeout)


async def end_quietly(command: Command) -> None:
    """Also in a task that is cancelled."""
    ending = asyncio.ensure_future(command.kill(timeout=15))
    await asyncio.wait({ending}, timeout=15)
    if ending.done() and not ending.cancelled():
        ending.exception()


async def pieces_of(data: Input) -> AsyncIterator[bytes]:
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        whole = bytes(data)
        for at in range(0, len(whole), INPUT_BYTES):
            yield whole[at : at + INPUT_BYTES]
        return
    async for part in data:
        async for piece in pieces_of(part):
            yield piece
