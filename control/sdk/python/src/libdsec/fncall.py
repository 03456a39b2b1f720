"""Short tasks that leave nothing behind: code goes in, what it wrote, used and made comes out."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional, Sequence, Union

from .run_args import camel, mebibytes, milliseconds
from .transport import Transport, without_none

Content = Union[str, bytes]


@dataclass
class DSecFnCallRunArgs:
    """A task, in the words of the other run arguments."""

    language: str = ""
    code: Optional[str] = None
    #: In place of a pool.
    container_image: Optional[str] = None
    pool: Optional[str] = None
    workspace: Optional[str] = None
    toolkits: Optional[Sequence[str]] = None
    project: Optional[str] = None
    #: By path.
    files: Optional[Mapping[str, Content]] = None
    stdin: Optional[Content] = None
    args: Optional[Sequence[str]] = None
    env: Optional[Mapping[str, str]] = None
    #: MiB.
    memory_limit_mb: Optional[float] = None
    #: MiB.
    disk_limit_mb: Optional[float] = None
    pids_limit: Optional[int] = None
    #: Of the run, in seconds; the compiler has its own.
    time_limit_seconds: Optional[float] = None
    #: Processor time of all its processes together.
    cpu_limit_seconds: Optional[float] = None
    #: Further ones (`output_bytes`, `compile_ms`), above those before.
    limits: Optional[Mapping[str, int]] = None
    #: Patterns of files to bring back.
    fetch: Optional[Sequence[str]] = None
    compile_only: Optional[bool] = None
    #: False: by an interpreter that starts for it.
    warm: Optional[bool] = None
    #: Arguments of `fncall.run`, of a task that runs before it: the files that it gives back (`fetch`) are put in.
    made_from: Optional[Mapping[str, Any]] = None


@dataclass(frozen=True)
class FnCallStep:
    """The compiler, or the program."""

    #: `finished`, `runtime_error`, `time_limit`, `memory_limit`, `output_limit` or `sandbox_error`.
    status: str
    #: None when a signal ended it.
    exit_code: Optional[int]
    signal: Optional[str]
    stdout: bytes
    stderr: bytes
    #: What it wrote: more than there is above where that is cut.
    stdout_bytes: int
    stderr_bytes: int
    #: Seconds.
    wall_time: float
    cpu_time: float
    peak_memory_bytes: Optional[int]


@dataclass(frozen=True)
class FnCallResult:
    #: As of a step, or `compile_error`.
    status: str
    problem: Optional[str]
    compile: Optional[FnCallStep]
    run: Optional[FnCallStep]
    files: Dict[str, bytes] = field(default_factory=dict)
    pool: str = ""
    #: Seconds.
    queue_time: float = 0.0


class FnCall:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def run(
        self,
        language: str,
        code: Optional[str] = None,
        *,
        pool: Optional[str] = None,
        image: Optional[str] = None,
        workspace: Optional[str] = None,
        toolkits: Optional[Sequence[str]] = None,
        project: Optional[str] = None,
        files: Optional[Mapping[str, Content]] = None,
        stdin: Optional[Content] = None,
        args: Optional[Sequence[str]] = None,
        env: Optional[Mapping[str, str]] = None,
        limits: Optional[Mapping[str, int]] = None,
        fetch: Optional[Sequence[str]] = None,
        compile_only: Optional[bool] = None,
        warm: Optional[bool] = None,
        made_from: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
    ) -> FnCallResult:
        """While all are busy it is asked again, until the time is up. `limits`: wallMs, compileMs, cpuMs, memoryBytes, pids, outputBytes, diskBytes.
        `made_from`: arguments of `run` again, of a task that runs before it, maybe in another pool: the files that it gives back (`fetch`) are put in.

        Raises RateLimited, NotFound, InvalidRequest, Unavailable.
        """
        body = _task_body(
            language,
            code,
            pool=pool,
            image=image,
            workspace=workspace,
            toolkits=toolkits,
            files=files,
            stdin=stdin,
            args=args,
            env=env,
            limits=limits,
            fetch=fetch,
            compile_only=compile_only,
            warm=warm,
        )
        if project is not None:
            body["project"] = project
        if made_from is not None:
            body["from"] = _task_body(**made_from)
        answer = await self._transport.json("POST", "/v1/fncall/run", body=body, timeout=timeout)
        return FnCallResult(
            status=answer["status"],
            problem=answer.get("problem"),
            compile=_step_of(answer.get("compile")),
            run=_step_of(answer.get("run")),
            files={one["path"]: _bytes_of(one, "content") for one in answer.get("files", [])},
            pool=answer.get("pool", ""),
            queue_time=answer.get("queueMs", 0) / 1000,
        )

    async def run_args(self, args: DSecFnCallRunArgs, *, timeout: Optional[float] = None) -> FnCallResult:
        """`run`, of what `DSecClient.run_fncall` takes."""
        named: Dict[str, int] = without_none(
            wallMs=milliseconds(args.time_limit_seconds),
            cpuMs=milliseconds(args.cpu_limit_seconds),
            memoryBytes=mebibytes(args.memory_limit_mb),
            diskBytes=mebibytes(args.disk_limit_mb),
            pids=args.pids_limit,
        )
        return await self.run(
            args.language,
            args.code,
            pool=args.pool,
            image=args.container_image,
            workspace=args.workspace,
            toolkits=args.toolkits,
            project=args.project,
            files=args.files,
            stdin=args.stdin,
            args=args.args,
            env=args.env,
            limits={**named, **{camel(key): value for key, value in (args.limits or {}).items()}},
            fetch=args.fetch,
            compile_only=args.compile_only,
            warm=args.warm,
            made_from=args.made_from,
            timeout=timeout,
        )

    async def languages(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        """How each language is compiled and run."""
        answer: Dict[str, Any] = await self._transport.json("GET", "/v1/fncall/languages", timeout=timeout)
        return answer


def _task_body(
    language: str,
    code: Optional[str] = None,
    *,
    pool: Optional[str] = None,
    image: Optional[str] = None,
    workspace: Optional[str] = None,
    toolkits: Optional[Sequence[str]] = None,
    files: Optional[Mapping[str, Content]] = None,
    stdin: Optional[Content] = None,
    args: Optional[Sequence[str]] = None,
    env: Optional[Mapping[str, str]] = None,
    limits: Optional[Mapping[str, int]] = None,
    fetch: Optional[Sequence[str]] = None,
    compile_only: Optional[bool] = None,
    warm: Optional[bool] = None,
) -> Dict[str, Any]:
    given = None if files is None else [{"path": path, "contentBase64": _base64(one)} for path, one in files.items()]
    return without_none(
        language=language,
        code=code,
        pool=pool,
        image=image,
        workspace=workspace,
        toolkits=None if toolkits is None else list(toolkits),
        files=given,
        stdinBase64=None if stdin is None else _base64(stdin),
        args=None if args is None else list(args),
        env=None if env is None else dict(env),
        limits=None if limits is None else dict(limits),
        fetch=None if fetch is None else list(fetch),
        compileOnly=compile_only,
        warm=warm,
    )


def _base64(content: Content) -> str:
    data = content.encode() if isinstance(content, str) else content
    return base64.b64encode(data).decode()


def _bytes_of(wire: Mapping[str, Any], name: str) -> bytes:
    encoded = wire.get(name + "Base64")
    return str(wire.get(name, "")).encode() if encoded is None else base64.b64decode(encoded)


def _step_of(wire: Optional[Mapping[str, Any]]) -> Optional[FnCallStep]:
    if wire is None:
        return None
    return FnCallStep(
        status=wire["status"],
        exit_code=wire.get("exitCode"),
        signal=wire.get("signal"),
        stdout=_bytes_of(wire, "stdout"),
        stderr=_bytes_of(wire, "stderr"),
        stdout_bytes=wire["stdoutBytes"],
        stderr_bytes=wire["stderrBytes"],
        wall_time=wire["wallMs"] / 1000,
        cpu_time=wire["cpuMs"] / 1000,
        peak_memory_bytes=wire.get("peakMemoryBytes"),
    )
