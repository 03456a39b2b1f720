"""How a command ended, and what it wrote."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, List, Mapping, Optional, Tuple


@dataclass(frozen=True)
class ExecResult:
    #: 128 + n after signal n.
    exit_code: int
    signal: Optional[str]
    #: Ended by its time-out, with every process of it.
    timed_out: bool
    #: Memory ran out in the sandbox, and the kernel chose this.
    out_of_memory: bool
    duration_ms: float
    stdout_bytes: int
    stderr_bytes: int

    @staticmethod
    def of(view: Mapping[str, Any]) -> ExecResult:
        return ExecResult(
            exit_code=view["exitCode"],
            signal=view.get("signal"),
            timed_out=view.get("timedOut", False),
            out_of_memory=view.get("outOfMemory", False),
            duration_ms=view.get("durationMs", 0),
            stdout_bytes=view.get("stdoutBytes", 0),
            stderr_bytes=view.get("stderrBytes", 0),
        )


@dataclass(frozen=True)
class CommandResult:
    exit_code: int
    signal: Optional[str]
    timed_out: bool
    out_of_memory: bool
    duration_ms: float
    stdout_raw: bytes
    stderr_raw: bytes
    #: Bytes that are not in it: they lay in the middle, where `output_limit` or the service's limit was passed.
    stdout_missing_bytes: int
    stderr_missing_bytes: int

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout(self) -> str:
        """As UTF-8."""
        return self.stdout_raw.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_raw.decode("utf-8", "replace")


class Collector:
    """Keeps the beginning and the end of a stream, each up to half of the limit."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head: List[bytes] = []
        self._head_bytes = 0
        self._tail: Deque[bytes] = deque()
        self._tail_bytes = 0
        self._missing = 0

    def add(self, data: bytes) -> None:
        room = min(self._half - self._head_bytes, len(data)) if self._missing == 0 else 0
        if room > 0:
            self._head.append(data[:room])
            self._head_bytes += room
        rest = data[room:]
        if not rest:
            return
        self._tail.append(rest)
        self._tail_bytes += len(rest)
        over = self._tail_bytes - self._half
        while over > 0:
            first = self._tail[0]
            cut = min(over, len(first))
            if cut == len(first):
                self._tail.popleft()
            else:
                self._tail[0] = first[cut:]
            self._tail_bytes -= cut
            self._missing += cut
            over -= cut

    def skip(self, count: int) -> None:
        """So many bytes are lost between what came before and what comes. What is kept stays one gap."""
        if count <= 0:
            return
        self._missing += count + self._tail_bytes
        self._tail.clear()
        self._tail_bytes = 0

    def collected(self) -> Tuple[bytes, int]:
        return b"".join([*self._head, *self._tail]), self._missing
