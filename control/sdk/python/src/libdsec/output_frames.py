"""A command's output as the API sends it: frames of u32 length, u8 kind, payload, little-endian. Offsets are those of the stream.

    1 stdout, 2 stderr   u64 offset, bytes
    3 missing            u8 stream, u64 offset, u64 how many
    4 result             JSON: how the command ended; the last frame
    5 error              JSON; the last frame
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import AsyncIterator, Dict, Iterator, Union

from .command_result import ExecResult
from .errors import DSecError, error_from, protocol_error

_HEADER = struct.Struct("<IB")
_MAX_FRAME_BYTES = 4 << 20


@dataclass(frozen=True)
class OutputPart:
    """In order for each stream; `missing_bytes` instead of data where output is lost."""

    stream: str
    offset: int
    data: bytes = b""
    missing_bytes: int = 0

    def __len__(self) -> int:
        return self.missing_bytes or len(self.data)


OutputNews = Union[OutputPart, ExecResult, DSecError]


async def parse_frames(stream: AsyncIterator[bytes]) -> AsyncIterator[OutputNews]:
    rest = bytearray()
    async for data in stream:
        rest += data
        at = 0
        while len(rest) - at >= _HEADER.size:
            length, kind = _HEADER.unpack_from(rest, at)
            if length > _MAX_FRAME_BYTES:
                raise protocol_error(f"a frame of {length} bytes")
            if len(rest) - at < _HEADER.size + length:
                break
            at += _HEADER.size
            yield _news_of(kind, bytes(rest[at : at + length]))
            at += length
        del rest[:at]


def _news_of(kind: int, payload: bytes) -> OutputNews:
    try:
        if kind in (1, 2):
            (offset,) = struct.unpack_from("<Q", payload)
            return OutputPart("stderr" if kind == 2 else "stdout", offset, payload[8:])
        if kind == 3:
            stream, offset, missing = struct.unpack("<BQQ", payload)
            return OutputPart("stderr" if stream == 2 else "stdout", offset, missing_bytes=missing)
        if kind == 4:
            return ExecResult.of(json.loads(payload))
        if kind == 5:
            return error_from(json.loads(payload))
    except (struct.error, ValueError, KeyError) as error:
        raise protocol_error("a frame that is cut short") from error
    raise protocol_error(f"a frame of kind {kind}")


def only_new(part: OutputPart, at: Dict[str, int]) -> Iterator[OutputPart]:
    """Of a part, what lies behind what is known; `at` moves on."""
    known = at[part.stream]
    length = len(part)
    if part.offset > known:
        yield OutputPart(part.stream, known, missing_bytes=part.offset - known)
    skip = max(0, known - part.offset)
    if skip >= length:
        return
    at[part.stream] = part.offset + length
    if part.missing_bytes:
        yield OutputPart(part.stream, part.offset + skip, missing_bytes=length - skip)
    else:
        yield OutputPart(part.stream, part.offset + skip, part.data[skip:] if skip else part.data)


def offset_of(value: Union[int, bool, None]) -> int:
    """False leaves a stream out: nothing is ever beyond this."""
    return 2**53 - 1 if value is False else int(value or 0)


