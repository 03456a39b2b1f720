"""A shell session: commands one after the other in one shell, which keeps its folder, variables and functions between them."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Any, AsyncGenerator, Mapping, Optional, Pattern, Tuple, Type, Union

from .closing import closing
from .command import INPUT_BYTES
from .errors import DSecError, DSecTimeoutError, ShellLost
from .output_frames import OutputPart, offset_of, only_new, parse_frames
from .transport import BackOff, Transport, body_of, without_none

EXPECT_S = 30.0
#: So much of what does not match is kept to match with what follows.
_EXPECT_BYTES = 1 << 20


@dataclass(frozen=True)
class ShellResult:
    exit_code: int
    stdout_raw: bytes
    stderr_raw: bytes
    #: Output beyond what a result holds.
    missing_bytes: int
    timed_out: bool
    #: The shell went with it: this was its last command.
    lost: bool

    @staticmethod
    def of(view: Mapping[str, Any]) -> ShellResult:
        return ShellResult(
            exit_code=view["exitCode"],
            stdout_raw=base64.b64decode(view["stdoutBase64"]),
            stderr_raw=base64.b64decode(view["stderrBase64"]),
            missing_bytes=view["missingBytes"],
            timed_out=view["timedOut"],
            lost=view["lost"],
        )

    @property
    def stdout(self) -> str:
        return self.stdout_raw.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_raw.decode("utf-8", "replace")


@dataclass(frozen=True)
class Expected:
    #: What came since the last time, to the end of the match.
    output: bytes
    #: What matched, and its groups.
    match: Tuple[Optional[str], ...]


class ShellSession:
    def __init__(self, transport: Transport, sandbox_path: str, id: int) -> None:
        self._transport = transport
        self.id = id
        self._path = f"{sandbox_path}/shells/{id}"
        # What `expect` has not looked at begins here.
        self._position = 0

    async def run(self, command: str, *, timeout: Optional[float] = None) -> ShellResult:
        """Runs a command, after those before it. A status that is not 0 is in the result. Cancelled, it gets SIGINT.

        After `timeout` the command is interrupted, and the result says `timed_out`.
        """
        body = without_none(command=command, timeoutMs=None if timeout is None else round(timeout * 1000))
        try:
            return ShellResult.of(await self._transport.json("POST", f"{self._path}/run", body=body))
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(self.interrupt(timeout=15))
            await asyncio.wait({ending}, timeout=15)
            if ending.done() and not ending.cancelled():
                ending.exception()
            raise

    async def send(self, data: Union[str, bytes], *, timeout: Optional[float] = None) -> None:
        """Input for what runs now, on a terminal."""
        whole = data.encode() if isinstance(data, str) else data
        for at in range(0, len(whole), INPUT_BYTES):
            piece = whole[at : at + INPUT_BYTES]
            await self._transport.json("POST", f"{self._path}/stdin", data=piece, timeout=timeout)

    async def expect(
        self, pattern: Union[str, bytes, Pattern[str], Pattern[bytes]], *, timeout: float = EXPECT_S
    ) -> Expected:
        """Waits until it is in the session's output behind what was expected before."""
        seen = bytearray()

        async def look() -> Expected:
            async with closing(self.output(stdout=self._position, stderr=False)) as parts:
                async for part in parts:
                    if part.missing_bytes:
                        seen.clear()
                    seen.extend(part.data)
                    end = part.offset + len(part)
                    found = _match_in(bytes(seen), pattern)
                    if found is not None:
                        length, match = found
                        self._position = end - len(seen) + length
                        return Expected(bytes(seen[:length]), match)
                    if len(seen) > 2 * _EXPECT_BYTES:
                        del seen[:-_EXPECT_BYTES]
            raise ShellLost("the shell session is lost: it has ended", code="RUNTIME_SHELL_LOST")

        try:
            return await asyncio.wait_for(look(), timeout)
        except asyncio.TimeoutError:
            wanted = pattern if isinstance(pattern, (str, bytes)) else pattern.pattern
            last = json.dumps(bytes(seen[-500:]).decode("utf-8", "replace"))
            raise DSecTimeoutError(
                f"the shell did not write {wanted!r} within {timeout} s; the last it wrote: {last}",
                code="TIMEOUT",
                retryable=True,
            ) from None

    async def output(
        self, *, stdout: Union[int, bool] = 0, stderr: Union[int, bool] = 0, follow: bool = True
    ) -> AsyncGenerator[OutputPart, None]:
        """Its output as it comes, to its end; over connections that break."""
        at = {"stdout": offset_of(stdout), "stderr": offset_of(stderr)}
        back_off = BackOff(self._transport.patience)
        while True:
            try:
                query = {**at, "follow": None if follow else False}
                response = await self._transport.once("GET", f"{self._path}/output", query=query)
                async with closing(body_of(response)) as body:
                    async for news in parse_frames(body):
                        back_off.progress()
                        if isinstance(news, OutputPart):
                            for part in only_new(news, at):
                                yield part
                return
            except DSecError as error:
                await back_off.after(error)

    async def interrupt(self, *, timeout: Optional[float] = None) -> None:
        """SIGINT to what runs now."""
        await self._transport.json("POST", f"{self._path}/interrupt", timeout=timeout)

    async def resize(self, rows: int, columns: int, *, timeout: Optional[float] = None) -> None:
        body = {"rows": rows, "columns": columns}
        await self._transport.json("POST", f"{self._path}/resize", body=body, timeout=timeout)

    async def close(self, *, timeout: Optional[float] = None) -> None:
        """Ends it with all that it started."""
        await self._transport.json("DELETE", self._path, timeout=timeout)

    async def __aenter__(self) -> ShellSession:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        closing_it = asyncio.ensure_future(self.close(timeout=15))
        await asyncio.wait({closing_it}, timeout=15)
        if closing_it.done() and not closing_it.cancelled():
            closing_it.exception()


def _match_in(
    seen: bytes, pattern: Union[str, bytes, Pattern[str], Pattern[bytes]]
) -> Optional[Tuple[int, Tuple[Optional[str], ...]]]:
    if isinstance(pattern, (str, bytes)):
        wanted = pattern.encode() if isinstance(pattern, str) else pattern
        at = seen.find(wanted)
        return None if at < 0 else (at + len(wanted), (wanted.decode("utf-8", "replace"),))
    if isinstance(pattern.pattern, bytes):
        in_bytes = re.compile(pattern.pattern, pattern.flags).search(seen)
        if in_bytes is None:
            return None
        groups = (in_bytes.group(0), *in_bytes.groups())
        return in_bytes.end(), tuple(None if one is None else one.decode("utf-8", "replace") for one in groups)
    # What is no UTF-8 comes back as the bytes that it was.
    text = seen.decode("utf-8", "surrogateescape")
    in_text = re.compile(pattern.pattern, pattern.flags).search(text)
    if in_text is None:
        return None
    length = len(text[: in_text.end()].encode("utf-8", "surrogateescape"))
    return length, (in_text.group(0), *in_text.groups())
