"""Every error of this library, one class a kind.

Whoever catches looks at the class or at `code`, never at the text. The TypeScript library has the same table; control/sdk/errors.json is what
both are held to.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Tuple, Type

if TYPE_CHECKING:
    from .command_result import CommandResult


class DSecError(Exception):
    """`code` is the API's (docs/errors.md) or this library's; `retryable`: the same call may succeed later with nothing changed."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: Optional[str] = None,
        retryable: bool = False,
        request_id: Optional[str] = None,
        status: Optional[int] = None,
        retry_after: Optional[float] = None,
        reason: Optional[str] = None,
        backend: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.retryable = retryable
        #: Of the request, as the service's logs have it.
        self.request_id = request_id
        #: Of HTTP; None for errors that were made here.
        self.status = status
        #: Seconds.
        self.retry_after = retry_after


class AuthenticationError(DSecError):
    pass


class PermissionDenied(DSecError):
    pass


class QuotaExceeded(DSecError):
    pass


class RateLimited(DSecError):
    pass


class NoCapacity(DSecError):
    pass


class CommandNotStarted(DSecError):
    pass


class ShellLost(DSecError):
    pass


class FileError(DSecError):
    pass


class FileChanged(DSecError):
    pass


class InvalidRequest(DSecError):
    pass


class NotFound(DSecError):
    pass


class Conflict(DSecError):
    pass


class Unavailable(DSecError):
    pass


class ServerError(DSecError):
    pass


class ConnectionLost(DSecError):
    pass


class DSecTimeoutError(DSecError):
    pass


class ProtocolError(DSecError):
    pass


class ConfigurationError(DSecError):
    pass


#: As the API tells them, and how its words for people begin.
_END_REASONS = (
    ("stopped", "it was stopped"),
    ("expired", "its time was up"),
    ("idle", "nobody had used it"),
    ("out-of-memory", "memory ran out"),
    ("killed", "its agent was ended by signal"),
    ("failed", "its agent broke", "its agent exited"),
    ("lost", "the process that kept it", "it had ended"),
)


class SandboxGone(DSecError):
    """Never a failed command: that has a result. `reason`: stopped, expired, idle, out-of-memory, killed, failed, lost; None when not known."""

    def __init__(self, message: str, *, reason: Optional[str] = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        told = message.partition(": ")[2]
        known = next((words for words in _END_REASONS if told.startswith(words)), None)
        self.reason: Optional[str] = reason or (known[0] if known else None)


class UnsupportedError(DSecError):
    """`backend` names what cannot do it."""

    def __init__(self, message: str, *, backend: Optional[str] = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        named = re.search(r'\bbackend "?([a-z]+)', message)
        self.backend: Optional[str] = backend or (named.group(1) if named else None)


class CommandFailed(DSecError):
    """`check` was asked for; `result` is what the command gave."""

    def __init__(self, result: CommandResult) -> None:
        how = "was ended at its time-out" if result.timed_out else f"exited with {result.exit_code}"
        said = result.stderr.strip()[-2000:]
        super().__init__(f"the command {how}{': ' + said if said else ''}", code="COMMAND_FAILED")
        self.result = result


#: In order; a code is looked for before a status.
ERROR_TABLE: List[Tuple[Type[DSecError], Tuple[str, ...], Tuple[int, ...]]] = [
    (AuthenticationError, ("IAM_TOKEN_INVALID",), (401,)),
    (PermissionDenied, ("IAM_DENIED",), (403,)),
    (QuotaExceeded, ("IAM_QUOTA",), ()),
    (RateLimited, (), (429,)),
    (NoCapacity, ("EDGE_REFUSED", "PLACEMENT_NO_ROOM"), ()),
    (SandboxGone, ("RUNTIME_SANDBOX_GONE", "RUNTIME_SANDBOX_NOT_FOUND", "SANDBOX_GONE"), ()),
    (CommandNotStarted, ("RUNTIME_COMMAND_NOT_EXECUTABLE", "RUNTIME_COMMAND_NOT_FOUND"), ()),
    (ShellLost, ("RUNTIME_SHELL_LOST",), ()),
    (FileError, ("RUNTIME_FILE", "SANDBOX_NO_FILE"), ()),
    (FileChanged, ("RUNTIME_UPLOAD_DIGEST", "FILE_CHANGED"), ()),
    (UnsupportedError, ("RUNTIME_UNSUPPORTED",), (501,)),
    (InvalidRequest, (), (400, 413, 415, 422)),
    (NotFound, (), (404,)),
    (Conflict, (), (409,)),
    (Unavailable, ("EDGE_UNREACHABLE",), (502, 503, 504)),
    (ServerError, (), (500,)),
]


_STATUS_OF_EXIT = {2: 400, 3: 422, 4: 404, 6: 503}


def error_from(
    facts: Mapping[str, Any],
    *,
    status: Optional[int] = None,
    request_id: Optional[str] = None,
    retry_after: Optional[float] = None,
) -> DSecError:
    code = str(facts.get("code"))
    kind = next((kind for kind, codes, _ in ERROR_TABLE if code in codes), None)
    if kind is None:
        # Of errors inside an answer (a line of a batch, the end of a stream), which have the exit status of the command line alone.
        likely = status if status is not None else _STATUS_OF_EXIT.get(facts.get("exit", 0))
        kind = next((kind for kind, _, statuses in ERROR_TABLE if likely in statuses), DSecError)
    more = {name: facts[name] for name in ("reason", "backend") if isinstance(facts.get(name), str)}
    return kind(
        str(facts.get("message")),
        code=code,
        hint=facts.get("hint"),
        retryable=facts.get("retryable") is True,
        request_id=facts.get("requestId") or request_id,
        status=status,
        retry_after=retry_after,
        **more,
    )


def protocol_error(problem: str) -> ProtocolError:
    return ProtocolError(f"the API does not answer as it should: {problem}", code="PROTOCOL")


def connection_lost(problem: str) -> ConnectionLost:
    return ConnectionLost(
        f"the API gave no answer: {problem}",
        code="CONNECTION_LOST",
        hint="is it there? The URL is in the context, or in $DSEC_API",
        retryable=True,
    )
