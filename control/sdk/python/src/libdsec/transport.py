"""Requests to the API: one at a time (`once`), and with what is retried (`call`).

Tried again is only what the API says may help (429 and 503 that are retryable), and what got no answer; and only where twice is as once: reads, and
changes that carry an operation id (x-dsec-operation), of which the service does each once and repeats its answer. Waits grow, with chance, and are
never shorter than Retry-After. It ends with the call's time, or when nothing has come for the client's patience.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import sys
import time
import uuid
from email.utils import parsedate_to_datetime
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Mapping, Optional, Tuple, TypeVar, Union
from urllib.parse import quote

import httpx

from .context import Endpoint
from .errors import DSecError, DSecTimeoutError, connection_lost, error_from, protocol_error

T = TypeVar("T")
Query = Mapping[str, Union[str, int, float, bool, None]]
Content = Union[bytes, AsyncIterator[bytes]]

_CONNECT_S = 15.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 10.0
_UNDO_S = 15.0


class Transport:
    def __init__(self, endpoint: Endpoint, patience: float) -> None:
        self.url = endpoint.url
        self.patience = patience
        self._token = endpoint.token
        # Loading certificates takes longer than many a call.
        verify: Union[bool, ssl.SSLContext] = endpoint.url.startswith("https:")
        if endpoint.ca is not None:
            verify = ssl.create_default_context(cafile=endpoint.ca)
        # Streams may be silent for long, and each holds a connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=verify, limits=limits, socket_options=_socket_options()),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def headers(self) -> Dict[str, str]:
        return {} if self._token is None else {"authorization": f"Bearer {self._token}"}

    async def json(
        self,
        method: str,
        path: str,
        *,
        query: Optional[Query] = None,
        body: Optional[Mapping[str, Any]] = None,
        data: Optional[bytes] = None,
        timeout: Optional[float] = None,
    ) -> Any:
        """The answer's JSON. A change is one operation, however often it is sent."""
        return parsed(await self.call(method, path, query=query, body=body, data=data, timeout=timeout))

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Optional[Query] = None,
        body: Optional[Mapping[str, Any]] = None,
        data: Optional[bytes] = None,
        timeout: Optional[float] = None,
    ) -> bytes:
        operation = _operation_for(method, body, data)
        # What is too large for the service to put on record is sent once, unless twice is as once.
        only_once = operation is None and method not in ("GET", "PUT")
        deadline = None if timeout is None else time.monotonic() + timeout

        async def work() -> bytes:
            return await drain(await self.once(method, path, query=query, body=body, data=data, operation=operation))

        return await within(timeout, self.retrying(work, deadline=deadline, only_once=only_once))

    async def begin(
        self, path: str, body: Mapping[str, Any], stop: asyncio.Event, deadline: Optional[float] = None
    ) -> Any:
        """A change whose outcome is awaited once it is under way: `stop` ends the waits between tries alone. For `undoable`."""
        # Its request id makes it one.
        operation = _operation_for("POST", body, None)

        async def work() -> bytes:
            return await drain(await self.once("POST", path, body=body, operation=operation))

        return parsed(await self.retrying(work, stop=stop, deadline=deadline))

    async def retrying(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        stop: Optional[asyncio.Event] = None,
        deadline: Optional[float] = None,
        only_once: bool = False,
    ) -> T:
        """Until it succeeds or fails for good. `only_once`: not again when it may have been done."""
        back_off = BackOff(self.patience, deadline)
        while True:
            try:
                return await work()
            except DSecError as error:
                if only_once and error.code in ("CONNECTION_LOST", "EDGE_UNREACHABLE", "SERVICE_LOST"):
                    raise
                await back_off.after(error, stop)

    async def once(
        self,
        method: str,
        path: str,
        *,
        query: Optional[Query] = None,
        body: Optional[Mapping[str, Any]] = None,
        data: Optional[Content] = None,
        operation: Optional[str] = None,
    ) -> httpx.Response:
        """One try; the answer is a good one, and its body is still to come."""
        request_id = str(uuid.uuid4())
        headers = {**self.headers, "x-request-id": request_id, "accept": "*/*", "accept-encoding": "identity"}
        if operation is not None:
            headers["x-dsec-operation"] = operation
        content: Optional[Content] = data
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body).encode()
        elif data is not None:
            headers["content-type"] = "application/octet-stream"
        request = self._http.build_request(method, f"{self.url}{path}{query_of(query)}", headers=headers, content=content)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise connection_lost(str(error) or type(error).__name__) from error
        if response.status_code < 300:
            return response
        told = await drain(response)
        raise _error_of(response, told, request_id)


#: Of what the service can put on record.
_OPERATION_BYTES = 1 << 20


def _operation_for(method: str, body: Optional[Mapping[str, Any]], data: Optional[bytes]) -> Optional[str]:
    if method == "GET":
        return None
    size = len(data) if data is not None else 0 if body is None else len(json.dumps(body))
    return None if size > _OPERATION_BYTES else str(uuid.uuid4())


def without_none(**fields: Any) -> Dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


async def body_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """What comes of an answer, or the reason that it broke off."""
    try:
        async for data in response.aiter_raw():
            yield data
    except httpx.TransportError as error:
        raise connection_lost("it broke off in the middle of an answer") from error
    finally:
        await response.aclose()


async def drain(response: httpx.Response) -> bytes:
    parts: List[bytes] = []
    async for data in body_of(response):
        parts.append(data)
    return b"".join(parts)


class BackOff:
    """Waits between tries, as long as they may be worth it."""

    def __init__(self, patience: float, deadline: Optional[float] = None) -> None:
        self._patience = patience
        self._deadline = deadline
        self._since: Optional[float] = None
        self._tries = 0

    def progress(self) -> None:
        """Something came."""
        self._since = None
        self._tries = 0

    async def after(self, error: DSecError, stop: Optional[asyncio.Event] = None) -> None:
        """Raises the error itself when it is not to be tried again."""
        if not _is_worth_retrying(error) or (stop is not None and stop.is_set()):
            raise error
        now = time.monotonic()
        if self._since is None:
            self._since = now
        grown = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**self._tries)
        self._tries += 1
        wait = max(error.retry_after or 0.0, grown * (0.5 + random.random() / 2))
        deadline = self._deadline if self._deadline is not None else self._since + self._patience
        if now + wait > deadline:
            raise error
        if stop is None:
            await asyncio.sleep(wait)
            return
        try:
            await asyncio.wait_for(stop.wait(), wait)
        except asyncio.TimeoutError:
            return
        raise error


def _is_worth_retrying(error: DSecError) -> bool:
    if error.code == "CONNECTION_LOST":
        return True
    # A 429 that does not say when (a full quota) may last.
    if error.status == 503 and error.retryable:
        return True
    return error.status in (429, 503) and error.retry_after is not None


async def within(timeout: Optional[float], work: Awaitable[T]) -> T:
    if timeout is None:
        return await work
    try:
        return await asyncio.wait_for(work, timeout)
    except asyncio.TimeoutError:
        raise timed_out(timeout) from None


def timed_out(timeout: float) -> DSecTimeoutError:
    return DSecTimeoutError(f"not done within {timeout} s", code="TIMEOUT", retryable=True)


async def undoable(
    begin: Callable[[asyncio.Event], Awaitable[T]],
    undo: Callable[[T], Awaitable[object]],
    timeout: Optional[float] = None,
) -> T:
    """Something that is there once `begin` has succeeded. Given up meanwhile (cancelled, or out of time), its end is awaited all the same and it is undone."""
    stop = asyncio.Event()
    task: asyncio.Future[T] = asyncio.ensure_future(begin(stop))
    try:
        return await asyncio.wait_for(asyncio.shield(task), timeout)
    except (asyncio.CancelledError, asyncio.TimeoutError) as given_up:
        stop.set()

        async def finish() -> None:
            try:
                await undo(await task)
            except DSecError:
                pass

        finishing = asyncio.ensure_future(finish())
        await asyncio.wait({finishing}, timeout=_UNDO_S)
        if isinstance(given_up, asyncio.CancelledError) or timeout is None:
            raise
        raise timed_out(timeout) from None


def parsed(text: bytes) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError as error:
        raise protocol_error("an answer that is no JSON") from error


def _error_of(response: httpx.Response, body: bytes, request_id: str) -> DSecError:
    status = response.status_code
    retry_after = _retry_after_of(response.headers.get("retry-after"))
    request_id = response.headers.get("x-request-id") or request_id
    try:
        facts = json.loads(body)["error"]
        if not isinstance(facts["code"], str):
            raise ValueError("no code")
    except (ValueError, KeyError, TypeError):
        # Somebody between here and there.
        gateway = status in (429, 502, 503, 504)
        code = "CONNECTION_LOST" if gateway and status != 429 else f"HTTP_{status}"
        facts = {"code": code, "message": f"HTTP status {status}", "retryable": gateway}
    return error_from(facts, status=status, request_id=request_id, retry_after=retry_after)


def _retry_after_of(value: Optional[str]) -> Optional[float]:
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def query_of(query: Optional[Query]) -> str:
    pairs = [(key, value) for key, value in (query or {}).items() if value is not None]
    return "?" + "&".join(f"{key}={quote(_text_of(value), safe='')}" for key, value in pairs) if pairs else ""


def _text_of(value: Union[str, int, float, bool, None]) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _socket_options() -> List[Tuple[int, int, int]]:
    """So that a peer that vanished without a word is noticed while nothing is sent."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if sys.platform == "linux":
        options.append((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15))
        options.append((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15))
    return options
