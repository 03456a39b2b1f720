"""A sandbox, its commands, shells and files, without asyncio; for `libdsec.sync`."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Dict, List, Optional, Pattern, Sequence, Type, Union

from . import command as _command
from . import files as _files
from . import sandbox as _sandbox
from . import shell as _shell
from .command import OUTPUT_LIMIT_BYTES, CommandView, OnOutput
from .command_result import CommandResult, ExecResult
from .files import FileEntry, FileEvent, FileStatus, LocalPath
from .output_frames import OutputPart
from .run_args import Env, NetworkPolicy, NetworkRules
from .sandbox import PauseReport, SandboxInfo
from .shell import EXPECT_S, Expected, ShellResult
from .sync_screen import SandboxScreen
from .sync_thread import Input, Stream, input_of, run


class Command:
    def __init__(self, inner: _command.Command) -> None:
        self._inner = inner

    @property
    def id(self) -> int:
        return self._inner.id

    @property
    def result(self) -> Optional[ExecResult]:
        return self._inner.result

    def view(self, *, timeout: Optional[float] = None) -> CommandView:
        return run(self._inner.view(timeout=timeout))

    def output(
        self, *, stdout: Union[int, bool] = 0, stderr: Union[int, bool] = 0, follow: bool = True
    ) -> Stream[OutputPart]:
        return Stream(self._inner.output(stdout=stdout, stderr=stderr, follow=follow))

    def stream(self, name: str = "stdout") -> Stream[bytes]:
        return Stream(self._inner.stream(name))

    def wait(self, *, timeout: Optional[float] = None) -> ExecResult:
        return run(self._inner.wait(timeout=timeout))

    def collect(
        self,
        *,
        check: bool = False,
        output_limit: int = OUTPUT_LIMIT_BYTES,
        on_output: Optional[OnOutput] = None,
        timeout: Optional[float] = None,
    ) -> CommandResult:
        work = self._inner.collect(check=check, output_limit=output_limit, on_output=on_output, timeout=timeout)
        return run(work)

    def write(self, data: Input, *, timeout: Optional[float] = None) -> None:
        run(self._inner.write(input_of(data), timeout=timeout))

    def close_stdin(self, *, timeout: Optional[float] = None) -> None:
        run(self._inner.close_stdin(timeout=timeout))

    def signal(self, signal: str, *, timeout: Optional[float] = None) -> None:
        run(self._inner.signal(signal, timeout=timeout))

    def kill(self, *, timeout: Optional[float] = None) -> None:
        run(self._inner.kill(timeout=timeout))

    def resize(self, rows: int, columns: int, *, timeout: Optional[float] = None) -> None:
        run(self._inner.resize(rows, columns, timeout=timeout))

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        run(self._inner.__aexit__(kind, error, trace))


class ShellSession:
    def __init__(self, inner: _shell.ShellSession) -> None:
        self._inner = inner

    @property
    def id(self) -> int:
        return self._inner.id

    def run(self, command: str, *, timeout: Optional[float] = None) -> ShellResult:
        return run(self._inner.run(command, timeout=timeout))

    def send(self, data: Union[str, bytes], *, timeout: Optional[float] = None) -> None:
        run(self._inner.send(data, timeout=timeout))

    def expect(
        self, pattern: Union[str, bytes, Pattern[str], Pattern[bytes]], *, timeout: float = EXPECT_S
    ) -> Expected:
        return run(self._inner.expect(pattern, timeout=timeout))

    def output(
        self, *, stdout: Union[int, bool] = 0, stderr: Union[int, bool] = 0, follow: bool = True
    ) -> Stream[OutputPart]:
        return Stream(self._inner.output(stdout=stdout, stderr=stderr, follow=follow))

    def interrupt(self, *, timeout: Optional[float] = None) -> None:
        run(self._inner.interrupt(timeout=timeout))

    def resize(self, rows: int, columns: int, *, timeout: Optional[float] = None) -> None:
        run(self._inner.resize(rows, columns, timeout=timeout))

    def close(self, *, timeout: Optional[float] = None) -> None:
        run(self._inner.close(timeout=timeout))

    def __enter__(self) -> ShellSession:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        run(self._inner.__aexit__(kind, error, trace))


class SandboxFiles:
    def __init__(self, inner: _files.SandboxFiles) -> None:
        self._inner = inner

    def stat(self, path: str, *, timeout: Optional[float] = None) -> FileStatus:
        return run(self._inner.stat(path, timeout=timeout))

    def list(self, path: str, *, timeout: Optional[float] = None) -> List[FileEntry]:
        return run(self._inner.list(path, timeout=timeout))

    def read(self, path: str, *, timeout: Optional[float] = None) -> bytes:
        return run(self._inner.read(path, timeout=timeout))

    def read_text(self, path: str, *, timeout: Optional[float] = None) -> str:
        return run(self._inner.read_text(path, timeout=timeout))

    def read_stream(self, path: str, *, offset: int = 0) -> Stream[bytes]:
        return Stream(self._inner.read_stream(path, offset=offset))

    def write(
        self, path: str, content: Input, *, mode: Optional[int] = None, timeout: Optional[float] = None
    ) -> FileStatus:
        return run(self._inner.write(path, input_of(content), mode=mode, timeout=timeout))

    def mkdir(
        self, path: str, *, parents: bool = False, mode: Optional[int] = None, timeout: Optional[float] = None
    ) -> None:
        run(self._inner.mkdir(path, parents=parents, mode=mode, timeout=timeout))

    def remove(self, path: str, *, recursive: bool = False, timeout: Optional[float] = None) -> None:
        run(self._inner.remove(path, recursive=recursive, timeout=timeout))

    def rename(self, source: str, target: str, *, timeout: Optional[float] = None) -> None:
        run(self._inner.rename(source, target, timeout=timeout))

    def symlink(self, target: str, path: str, *, timeout: Optional[float] = None) -> None:
        run(self._inner.symlink(target, path, timeout=timeout))

    def readlink(self, path: str, *, timeout: Optional[float] = None) -> str:
        return run(self._inner.readlink(path, timeout=timeout))

    def digest(self, path: str, *, timeout: Optional[float] = None) -> str:
        return run(self._inner.digest(path, timeout=timeout))

    def watch(self, path: str, *, recursive: bool = False) -> Stream[FileEvent]:
        return Stream(run(self._inner.watch(path, recursive=recursive)))

    def upload(self, source: LocalPath, target: str, *, concurrency: int = 8) -> None:
        run(self._inner.upload(source, target, concurrency=concurrency))

    def download(self, source: str, target: LocalPath, *, concurrency: int = 8) -> None:
        run(self._inner.download(source, target, concurrency=concurrency))


class Sandbox:
    """Made by DSecClient."""

    def __init__(self, inner: _sandbox.Sandbox) -> None:
        self._inner = inner
        self.files = SandboxFiles(inner.files)
        self.screen = SandboxScreen(inner.screen)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def edge(self) -> str:
        return self._inner.edge

    @property
    def info(self) -> Optional[SandboxInfo]:
        return self._inner.info

    def view(self, *, timeout: Optional[float] = None) -> SandboxInfo:
        return run(self._inner.view(timeout=timeout))

    def exec(
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
        work = self._inner.exec(
            args,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            rows=rows,
            columns=columns,
            command_timeout=command_timeout,
            background=background,
            request_id=request_id,
            timeout=timeout,
        )
        return Command(run(work))

    def run(
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
        work = self._inner.run(
            args,
            timeout=timeout,
            check=check,
            env=env,
            cwd=cwd,
            user=user,
            input=None if input is None else input_of(input),
            output_limit=output_limit,
            on_output=on_output,
            request_id=request_id,
        )
        return run(work)

    def run_shell(
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
        work = self._inner.run_shell(
            command,
            timeout=timeout,
            check=check,
            env=env,
            cwd=cwd,
            user=user,
            input=None if input is None else input_of(input),
            output_limit=output_limit,
            on_output=on_output,
            request_id=request_id,
            shell=shell,
        )
        return run(work)

    def command(self, id: int) -> Command:
        return Command(self._inner.command(id))

    def commands(self, *, timeout: Optional[float] = None) -> List[CommandView]:
        return run(self._inner.commands(timeout=timeout))

    def open_shell(
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
        work = self._inner.open_shell(
            shell=shell, env=env, cwd=cwd, user=user, rows=rows, columns=columns, timeout=timeout
        )
        return ShellSession(run(work))

    def get_url(self, port: int, path: str = "/") -> str:
        return self._inner.get_url(port, path)

    def pause(self, *, timeout: Optional[float] = None) -> PauseReport:
        return run(self._inner.pause(timeout=timeout))

    def resume(self, *, timeout: Optional[float] = None) -> None:
        run(self._inner.resume(timeout=timeout))

    def pack_diff(
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
        work = self._inner.pack_diff(
            name, kind=kind, exclude=exclude, policy=policy, compress=compress, store=store, timeout=timeout
        )
        return run(work)

    def fork(
        self,
        *,
        count: int = 1,
        memory: Optional[bool] = None,
        snapshot: Optional[str] = None,
        ttl_seconds: Optional[float] = None,
        request_id: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> List[Sandbox]:
        work = self._inner.fork(
            count=count,
            memory=memory,
            snapshot=snapshot,
            ttl_seconds=ttl_seconds,
            request_id=request_id,
            timeout=timeout,
        )
        return [Sandbox(one) for one in run(work)]

    def update_limits(self, *, timeout: Optional[float] = None, **changes: Optional[float]) -> Dict[str, Any]:
        return run(self._inner.update_limits(timeout=timeout, **changes))

    def network(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return run(self._inner.network(timeout=timeout))

    def set_network_policy(self, policy: NetworkPolicy, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return run(self._inner.set_network_policy(policy, timeout=timeout))

    def set_network_rules(self, rules: NetworkRules, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return run(self._inner.set_network_rules(rules, timeout=timeout))

    def network_counters(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        return run(self._inner.network_counters(timeout=timeout))

    def network_denied(self, *, limit: Optional[int] = None, timeout: Optional[float] = None) -> List[Dict[str, Any]]:
        return run(self._inner.network_denied(limit=limit, timeout=timeout))

    def usage(self, *, disk: bool = False, timeout: Optional[float] = None) -> Dict[str, Any]:
        return run(self._inner.usage(disk=disk, timeout=timeout))

    def stop(self, *, grace: Optional[float] = None, keep: bool = False, timeout: Optional[float] = None) -> None:
        run(self._inner.stop(grace=grace, keep=keep, timeout=timeout))

    def remove(self, *, force: bool = False, timeout: Optional[float] = None) -> None:
        run(self._inner.remove(force=force, timeout=timeout))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        run(self._inner.__aexit__(kind, error, trace))
