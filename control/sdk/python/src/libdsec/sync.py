"""The same without asyncio: every call waits for its end.

All work is done by one event loop in a thread of its own, which the first client starts; clients can be used from any thread. Ctrl-C while a call waits
cancels it, as a task is cancelled: a command that was being run is ended.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Type, Union

from . import client as _client
from .errors import DSecError
from .fncall import DSecFnCallRunArgs, FnCallResult
from .run_args import DSecContainerRunArgs, DSecMicroVMRunArgs, DSecRunArgs, DSecVMRunArgs
from .sync_sandbox import Command, Sandbox, SandboxFiles, ShellSession
from .sync_thread import Stream, run
from .transport import Query

__all__ = ["BatchItem", "Command", "DSecClient", "FnCall", "Sandbox", "SandboxFiles", "SandboxList", "ShellSession", "Stream"]


class FnCall:
    def __init__(self, inner: _client.DSecClient) -> None:
        self._inner = inner

    def run(self, language: str, code: Optional[str] = None, **more: Any) -> FnCallResult:
        """As `libdsec.FnCall.run`."""
        return run(self._inner.fncall.run(language, code, **more))

    def languages(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return run(self._inner.fncall.languages(timeout=timeout))


class SandboxList:
    def __init__(self, inner: _client.SandboxList) -> None:
        self.sandboxes = [Sandbox(one) for one in inner.sandboxes]
        self.unreachable = inner.unreachable
        self.continue_from: Optional[str] = inner.continue_from


class BatchItem:
    def __init__(self, inner: _client.BatchItem) -> None:
        self.index = inner.index
        self.sandbox = None if inner.sandbox is None else Sandbox(inner.sandbox)
        self.error: Optional[DSecError] = inner.error


class DSecClient:
    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        *,
        context: Optional[str] = None,
        ca: Optional[str] = None,
        patience: float = _client.PATIENCE_S,
        command_timeout: Optional[float] = None,
    ) -> None:
        self._inner = _client.DSecClient(
            url, token, context=context, ca=ca, patience=patience, command_timeout=command_timeout
        )

    def open(self) -> DSecClient:
        run(self._inner.open())
        return self

    def close(self) -> None:
        run(self._inner.close())

    def __enter__(self) -> DSecClient:
        return self.open()

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def headers(self) -> Dict[str, str]:
        return self._inner.headers

    def run(self, backend: str, args: DSecRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        return Sandbox(run(self._inner.run(backend, args, timeout=timeout)))

    def run_container(self, args: DSecContainerRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        return Sandbox(run(self._inner.run_container(args, timeout=timeout)))

    def run_fncall(self, args: DSecFnCallRunArgs, *, timeout: Optional[float] = None) -> FnCallResult:
        return run(self._inner.run_fncall(args, timeout=timeout))

    def run_microvm(self, args: DSecMicroVMRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        return Sandbox(run(self._inner.run_microvm(args, timeout=timeout)))

    def run_vm(self, args: DSecVMRunArgs, *, timeout: Optional[float] = None) -> Sandbox:
        return Sandbox(run(self._inner.run_vm(args, timeout=timeout)))

    @property
    def fncall(self) -> FnCall:
        return FnCall(self._inner)

    def run_containers(
        self, args: Union[DSecContainerRunArgs, Sequence[DSecContainerRunArgs]], *, count: int = 1
    ) -> Iterator[BatchItem]:
        for item in Stream(self._inner.run_containers(args, count=count)):
            yield BatchItem(item)

    def get_sandbox(self, id: str, *, timeout: Optional[float] = None) -> Sandbox:
        return Sandbox(run(self._inner.get_sandbox(id, timeout=timeout)))

    def attach(self, id: str) -> Sandbox:
        return Sandbox(self._inner.attach(id))

    def list_sandboxes(
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
        work = self._inner.list_sandboxes(
            project=project,
            job=job,
            user=user,
            state=state,
            limit=limit,
            continue_from=continue_from,
            timeout=timeout,
        )
        return SandboxList(run(work))

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Optional[Query] = None,
        body: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
    ) -> Any:
        return run(self._inner.request(method, path, query=query, body=body, timeout=timeout))
