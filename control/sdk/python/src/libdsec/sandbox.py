"""One sandbox. Its state is the service's: nothing here has to live for it to go on."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Type
from urllib.parse import quote

from .command import Command, CommandView, Input, OnOutput, OUTPUT_LIMIT_BYTES, end_quietly
from .command_result import CommandResult
from .errors import DSecError, SandboxGone
from .files import SandboxFiles
from .run_args import Env, NetworkPolicy, NetworkRules, camel, env_of, milliseconds, policy_of
from .screen import SandboxScreen
from .shell import ShellSession
from .transport import Transport, undoable, without_none


@dataclass(frozen=True)
class SandboxInfo:
    """`raw` is all that the API told."""

    #: `NAME.EDGE`.
    id: str
    name: str
    edge: Optional[str]
    #: `running`, `paused`, `ended`.
    state: str
    project: Optional[str]
    user: Optional[str]
    job: Optional[str]
    created_at: Optional[str]
    expires_at: Optional[str]
    raw: Mapping[str, Any] = field(repr=False)

    @staticmethod
    def of(view: Mapping[str, Any]) -> SandboxInfo:
        return SandboxInfo(
            id=view["id"],
            name=view["name"],
            edge=view.get("edge"),
            state=view["state"],
            project=view.get("project"),
            user=view.get("user"),
            job=view.get("job"),
            created_at=view.get("createdAt"),
            expires_at=view.get("expiresAt"),
            raw=view,
        )


@dataclass(frozen=True)
class PauseReport:
    paused_at: str
    before_bytes: int
    after_bytes: int
    #: Why no memory was given back.
    reason: Optional[str]


class Sandbox:
    """Made by DSecClient."""

    def __init__(
        self,
        transport: Transport,
        id: str,
        info: Optional[SandboxInfo] = None,
        command_timeout: Optional[float] = None,
    ) -> None:
        self._transport = transport
        self._path = f"/v1/sandboxes/{quote(id, safe='')}"
        self._command_timeout = command_timeout
        self.id = id
        #: As it was told last; `view` asks.
        self.info = info
        self.files = SandboxFiles(transport, self._path)
        #: Of a full machine.
        self.screen = SandboxScreen(transport, self._path)

    @property
    def name(self) -> str:
        return self.id.rpartition(".")[0]

    @property
    def edge(self) -> str:
        return self.id.rpartition(".")[2]

    async def view(self, *, timeout: Optional[float] = None) -> SandboxInfo:
        self.info = SandboxInfo.of(await self._transport.json("GET", self._path, timeout=timeout))
        return self.info

    async def exec(
        self,
        args: Sequence[str],
        *,
        env: Optional[Env] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        stdin: bool = False,
        rows: Optional[int] = None,
        columns: Optional[int] = None,
        command_timeout: Optional[float] = None,
        background: bool = False,
        request_id: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> Command:
        """Starts a command: a program and its arguments, no shell. Given up while it is being started, it is ended.

        `stdin`: whether it has input, by `write` and `close_stdin`; else it finds its end at once. `rows` and `columns`: it has a terminal.
        `command_timeout`: then it is ended with all that it started; `timeout` is for the call. `background`: it does not keep an idle
        sandbox, and has no default time-out. `request_id`: the same one gives the same command.
        """
        if command_timeout is None and not background:
            command_timeout = self._command_timeout
        body = without_none(
            args=list(args),
            env=env_of(env),
            cwd=cwd,
            user=user,
            stdin=stdin,
            terminal=None if rows is None or columns is None else {"rows": rows, "columns": columns},
            background=background or None,
            requestId=request_id or str(uuid.uuid4()),
            timeoutMs=milliseconds(command_timeout),
        )

        async def begin(stop: asyncio.Event) -> Command:
            view = CommandView.of(await self._transport.begin(f"{self._path}/commands", body, stop))
            return Command(self._transport, self._path, view.id, view.result)

        return await undoable(begin, lambda command: command.kill(), timeout)

    async def run(
        self,
        args: Sequence[str],
        *,
        timeout: Optional[float] = None,
        check: bool = False,
        env: Optional[Env] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        input: Optional[Input] = None,
        output_limit: int = OUTPUT_LIMIT_BYTES,
        on_output: Optional[OnOutput] = None,
        request_id: Optional[str] = None,
    ) -> CommandResult:
        """Runs a command to its end. Cancelled, it is ended too.

        After `timeout` the command is ended with all that it started, and the result says `timed_out`.
        """
        command = await self.exec(
            args,
            env=env,
            cwd=cwd,
            user=user,
            stdin=input is not None,
            command_timeout=timeout,
            request_id=request_id,
        )
        feeding = None if input is None else asyncio.ensure_future(_feed(command, input))
        try:
            return await command.collect(check=check, output_limit=output_limit, on_output=on_output)
        except BaseException as error:
            if command.result is None and not isinstance(error, SandboxGone):
                await end_quietly(command)
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait({feeding})

    async def run_shell(
        self,
        command: str,
        *,
        timeout: Optional[float] = None,
        check: bool = False,
        env: Optional[Env] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        input: Optional[Input] = None,
        output_limit: int = OUTPUT_LIMIT_BYTES,
        on_output: Optional[OnOutput] = None,
        request_id: Optional[str] = None,
        shell: str = "/bin/sh",
    ) -> CommandResult:
        """`/bin/sh -c`. A status that is not 0 is in the result; with `check` it raises CommandFailed."""
        return await self.run(
            [shell, "-c", command],
            timeout=timeout,
            check=check,
            env=env,
            cwd=cwd,
            user=user,
            input=input,
            output_limit=output_limit,
            on_output=on_output,
            request_id=request_id,
        )

    def command(self, id: int) -> Command:
        """One that was started before, by its id."""
        return Command(self._transport, self._path, id)

    async def commands(self, *, timeout: Optional[float] = None) -> List[CommandView]:
        views = await self._transport.json("GET", f"{self._path}/commands", timeout=timeout)
        return [CommandView.of(view) for view in views]

    async def open_shell(
        self,
        *,
        shell: Optional[str] = None,
        env: Optional[Env] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        rows: Optional[int] = None,
        columns: Optional[int] = None,
        timeout: Optional[float] = None,
    ) -> ShellSession:
        """A shell that does command after command and keeps folder, variables and functions between them. `rows`, `columns`: on a terminal."""
        terminal = None if rows is None or columns is None else {"rows": rows, "columns": columns}
        body = without_none(shell=shell, env=env_of(env), cwd=cwd, user=user, terminal=terminal)

        async def begin(stop: asyncio.Event) -> ShellSession:
            view = await self._transport.begin(f"{self._path}/shells", body, stop)
            return ShellSession(self._transport, self._path, view["id"])

        return await undoable(begin, lambda session: session.close(), timeout)

    def get_url(self, port: int, path: str = "/") -> str:
        """Where what listens at this port inside is reached, with `client.headers`; WebSockets too."""
        return f"{self._transport.url}{self._path}/ports/{port}/{path[1:] if path.startswith('/') else path}"

    async def pause(self, *, timeout: Optional[float] = None) -> PauseReport:
        view = await self._transport.json("POST", f"{self._path}/pause", timeout=timeout)
        return PauseReport(view["pausedAt"], view["beforeBytes"], view["afterBytes"], view.get("reason"))

    async def resume(self, *, timeout: Optional[float] = None) -> None:
        """Beforehand: whatever is asked of a paused sandbox resumes it."""
        self.info = SandboxInfo.of(await self._transport.json("POST", f"{self._path}/resume", timeout=timeout))

    async def pack_diff(
        self,
        name: str,
        *,
        kind: Optional[str] = None,
        exclude: Optional[Sequence[str]] = None,
        policy: Optional[bool] = None,
        compress: Optional[str] = None,
        store: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> Dict[str, Any]:
        """An image of what it has changed, as `name`, `NAME:TAG`. The answer has `name`, `digest` and more."""
        listed = None if exclude is None else list(exclude)
        body = without_none(name=name, kind=kind, exclude=listed, policy=policy, compress=compress, store=store)
        packed = await self._transport.json("POST", f"{self._path}/pack-diff", body=body, timeout=timeout)
        return dict(packed)

    async def fork(
        self,
        *,
        count: int = 1,
        memory: Optional[bool] = None,
        snapshot: Optional[str] = None,
        ttl_seconds: Optional[float] = None,
        request_id: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> List[Sandbox]:
        """
        New sandboxes with its files as they are now; all or none. `memory`: of a virtual machine, what runs in it goes on in each; a container
        raises UnsupportedError.
        """
        body = without_none(
            count=count,
            memory=memory,
            snapshot=snapshot,
            requestId=request_id or str(uuid.uuid4()),
            ttlMs=milliseconds(ttl_seconds),
        )

        async def begin(stop: asyncio.Event) -> List[Sandbox]:
            forked = await self._transport.begin(f"{self._path}/fork", body, stop)
            infos = [SandboxInfo.of(view) for view in forked["sandboxes"]]
            return [Sandbox(self._transport, self._id_of(info), info, self._command_timeout) for info in infos]

        async def undo(made: List[Sandbox]) -> None:
            await asyncio.gather(*(one.remove(force=True) for one in made), return_exceptions=True)

        return await undoable(begin, undo, timeout)

    async def update_limits(self, *, timeout: Optional[float] = None, **changes: Optional[float]) -> Dict[str, Any]:
        """Limits that change: cpus, memory_bytes, memory_swap_bytes, pids, disk_bytes, inodes, io_read_bps, ...; None takes one away."""
        body = {camel(name): value for name, value in changes.items()}
        return dict(await self._transport.json("PUT", f"{self._path}/limits", body=body, timeout=timeout))

    async def network(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return dict(await self._transport.json("GET", f"{self._path}/network", timeout=timeout))

    async def set_network_policy(self, policy: NetworkPolicy, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        """All that it may reach, from now on."""
        body = {"policy": policy}
        return dict(await self._transport.json("PUT", f"{self._path}/network", body=body, timeout=timeout))

    async def set_network_rules(self, rules: NetworkRules, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return await self.set_network_policy(policy_of(rules), timeout=timeout)

    async def network_counters(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return dict(await self._transport.json("GET", f"{self._path}/network/counters", timeout=timeout))

    async def network_denied(
        self, *, limit: Optional[int] = None, timeout: Optional[float] = None
    ) -> List[Dict[str, Any]]:
        """Attempts that the policy denied, oldest first."""
        query = {"limit": limit}
        return list(await self._transport.json("GET", f"{self._path}/network/denied", query=query, timeout=timeout))

    async def usage(self, *, disk: bool = False, timeout: Optional[float] = None) -> Dict[str, Any]:
        """`disk`: what it changed is counted where no limit does."""
        query = {"disk": disk or None}
        return dict(await self._transport.json("GET", f"{self._path}/usage", query=query, timeout=timeout))

    async def stop(
        self, *, grace: Optional[float] = None, keep: bool = False, timeout: Optional[float] = None
    ) -> None:
        """Ends it, and removes what it changed unless `keep`; no error when it has ended. `grace`: between SIGTERM and SIGKILL."""
        body = without_none(timeMs=milliseconds(grace))
        try:
            await self._transport.json("POST", f"{self._path}/stop", body=body, timeout=timeout)
        except SandboxGone:
            pass
        if not keep:
            await self.remove(timeout=timeout)

    async def remove(self, *, force: bool = False, timeout: Optional[float] = None) -> None:
        """One that has ended, or any with `force`: with what it changed."""
        try:
            await self._transport.json("DELETE", self._path, query={"force": force or None}, timeout=timeout)
        except SandboxGone:
            pass

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        stopping = asyncio.ensure_future(self.stop())
        await asyncio.shield(stopping)

    def _id_of(self, info: SandboxInfo) -> str:
        """Of another sandbox of the same edge."""
        return info.id if info.id.startswith(f"{info.name}.") else f"{info.name}.{self.edge}"


async def _feed(command: Command, data: Input) -> None:
    """Input beside its output; a command that ends before it has read all is no error."""
    try:
        await command.write(data)
        await command.close_stdin()
    except DSecError:
        pass
    except Exception:
        # The source itself has failed: the command must not wait for more.
        await end_quietly(command)
