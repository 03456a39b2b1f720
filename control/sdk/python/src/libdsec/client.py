"""The API of a DSec cluster, as one caller: makes sandboxes, finds them, and whatever else it has (`request`)."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, AsyncGenerator, Dict, List, Mapping, Optional, Sequence, Set, Type, Union

from .closing import closing
from .context import find_endpoint
from .errors import DSecError, InvalidRequest, UnsupportedError, connection_lost, error_from, protocol_error
from .fncall import DSecFnCallRunArgs, FnCall, FnCallResult
from .run_args import (
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    DSecRunArgs,
    DSecVMRunArgs,
    create_body,
)
from .sandbox import Sandbox, SandboxInfo
from .transport import BackOff, Query, Transport, body_of, parsed, undoable, without_none

PATIENCE_S = 60.0


@dataclass(frozen=True)
class SandboxList:
    sandboxes: List[Sandbox]
    #: Edges that did not answer: what is on them is not in the list.
    unreachable: List[str]
    #: For the next page, where there is one.
    continue_from: Optional[str] = None


@dataclass(frozen=True)
class BatchItem:
    """One of both."""

    index: int
    sandbox: Optional[Sandbox]
    error: Optional[DSecError]


class DSecClient:
    """Without a URL: $DSEC_API, else the current context (or `context`) of ~/.config/dsec/contexts.json.

    `patience`: how many seconds no answer, or a refusal that may pass, is borne before a call without a time-out fails. `command_timeout`: of commands
    that have none of their own, in the sandbox; not of background ones.
    """

    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        *,
        context: Optional[str] = None,
        ca: Optional[str] = None,
        patience: float = PATIENCE_S,
        command_timeout: Optional[float] = None,
    ) -> None:
        self._endpoint = (url, token, context, ca)
        self._patience = patience
        self._command_timeout = command_timeout
        self._opened: Optional[Transport] = None

    async def open(self) -> DSecClient:
        """Finds out where the API is; every call does so where it was not done. Raises ConfigurationError."""
        self._transport
        return self

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return self._transport.url

    @property
    def headers(self) -> Dict[str, str]:
        """What a request of another program to a sandbox's port needs."""
        return self._transport.headers

    async def run(self, backend: str, args: DSecRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        """The same call whatever it is to live in: only the backend's name (`container`, `microvm`, `vm`) differs.

        The image is a container image, of `vm` a disk. Raises UnsupportedError for what a backend has not (docs/backends.md): of `fncall` there are no
        sandboxes.
        """
        return await self._create(backend, args, timeout)

    async def run_container(self, args: DSecContainerRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        """Returns when the sandbox is ready for its first command. Given up meanwhile (cancelled, or after `timeout`), it is removed.

        Until `timeout` it waits for room, too. Raises QuotaExceeded, NoCapacity, RateLimited, PermissionDenied, DSecTimeoutError.
        """
        return await self._create("container", args, timeout)

    async def run_fncall(self, args: DSecFnCallRunArgs, *, timeout: Optional[float] = None) -> FnCallResult:
        """A short task, without a sandbox of one's own: `fncall.run` in the words of the others. Raises as that does."""
        return await self.fncall.run_args(args, timeout=timeout)

    async def run_microvm(self, args: DSecMicroVMRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        """Raises UnsupportedError where the cluster has no such backend; as the one below."""
        return await self._create("microvm", args, timeout)

    async def run_vm(self, args: DSecVMRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        return await self._create("vm", args, timeout)

    @property
    def fncall(self) -> FnCall:
        """Short tasks."""
        return FnCall(self._transport)

    async def run_containers(
        self, args: Union[DSecContainerRunArgs, Sequence[DSecContainerRunArgs]], *, count: int = 1
    ) -> AsyncGenerator[BatchItem, None]:
        """Many at once, each told as it becomes ready or fails, with its index. What was told and is not wanted is the caller's to stop."""
        # Each has a request id of its own, so that asked again for all of them no one is made twice.
        mark = str(uuid.uuid4())
        if isinstance(args, DSecRunArgs):
            own = args.request_id
            each = [args if own is None else replace(args, request_id=f"{own}-{at}") for at in range(count)]
        else:
            each = list(args)
        requests = [create_body("container", one, f"{mark}-{at}") for at, one in enumerate(each)]
        told: Set[int] = set()
        back_off = BackOff(self._patience)
        while len(told) < len(requests):
            # Of those that are left, in their order.
            left = [at for at in range(len(requests)) if at not in told]
            try:
                body = {"requests": [requests[at] for at in left]}
                response = await self._transport.once("POST", "/v1/sandboxes/batch", body=body)
                rest = b""
                async with closing(body_of(response)) as stream:
                    async for data in stream:
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            if not line.strip():
                                continue
                            item = parsed(line)
                            place = item.get("index")
                            if not isinstance(place, int) or not 0 <= place < len(left) or left[place] in told:
                                continue
                            index = left[place]
                            back_off.progress()
                            told.add(index)
                            yield self._item_of(index, item)
                if len(told) < len(requests):
                    raise connection_lost("a batch that ends before all were told")
            except DSecError as error:
                await back_off.after(error)

    async def get_sandbox(self, id: str, *, timeout: Optional[float] = None) -> Sandbox:
        """One that is there. Raises SandboxGone."""
        sandbox = self.attach(id)
        await sandbox.view(timeout=timeout)
        return sandbox

    def attach(self, id: str) -> Sandbox:
        """One by its id; nothing is asked."""
        return Sandbox(self._transport, id, None, self._command_timeout)

    async def list_sandboxes(
        self,
        *,
        project: Optional[str] = None,
        job: Optional[str] = None,
        user: Optional[str] = None,
        state: Optional[str] = None,
        limit: Optional[int] = None,
        continue_from: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> SandboxList:
        """By edge and name: all of them, or with `limit` a page."""
        query = without_none(project=project, job=job, user=user, state=state, limit=limit)
        sandboxes: List[Sandbox] = []
        unreachable: Dict[str, None] = {}
        while True:
            asked = {**query, **without_none(**{"continue": continue_from})}
            told = await self._transport.json("GET", "/v1/sandboxes", query=asked, timeout=timeout)
            sandboxes += [self._sandbox_of(view) for view in told["sandboxes"]]
            unreachable.update(dict.fromkeys(told.get("unreachable", [])))
            continue_from = told.get("continue")
            if continue_from is None or limit is not None:
                return SandboxList(sandboxes, list(unreachable), continue_from)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Optional[Query] = None,
        body: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
    ) -> Any:
        """Anything else of the API (docs/api.md): its JSON."""
        return await self._transport.json(method, path, query=query, body=body, timeout=timeout)

    @property
    def _transport(self) -> Transport:
        if self._opened is None:
            self._opened = Transport(find_endpoint(*self._endpoint), self._patience)
        return self._opened

    async def _create(self, backend: str, args: DSecRunArgs, timeout: Optional[float]) -> Sandbox:
        body = create_body(backend, args, str(uuid.uuid4()))
        transport = self._transport
        deadline = None if timeout is None else time.monotonic() + timeout

        async def begin(stop: asyncio.Event) -> Sandbox:
            return self._sandbox_of(await transport.begin("/v1/sandboxes", body, stop, deadline))

        try:
            return await undoable(begin, lambda sandbox: sandbox.remove(force=True), timeout)
        except DSecError as error:
            unknown = isinstance(error, InvalidRequest) and backend != "container" and "backend" in error.message
            if not isinstance(error, UnsupportedError) and not unknown:
                raise
            raise UnsupportedError(
                error.message,
                code=error.code,
                hint=error.hint,
                request_id=error.request_id,
                status=error.status,
                backend=backend,
            ) from error

    def _sandbox_of(self, view: Mapping[str, Any]) -> Sandbox:
        info = SandboxInfo.of(view)
        return Sandbox(self._transport, info.id, info, self._command_timeout)

    def _item_of(self, index: int, item: Mapping[str, Any]) -> BatchItem:
        view = item.get("sandbox")
        if isinstance(view, dict):
            return BatchItem(index, self._sandbox_of(view), None)
        facts = item.get("error")
        return BatchItem(index, None, error_from(facts) if isinstance(facts, dict) else protocol_error(f"{item}"))
