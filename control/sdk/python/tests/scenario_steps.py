"""The steps of control/sdk/scenarios.json in Python; control/test/sdk/scenario-steps.ts has the same in TypeScript."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Awaitable, Callable, Dict, Optional

import httpx

from libdsec import (
    Command,
    CommandResult,
    DSecClient,
    DSecContainerRunArgs,
    DSecFnCallRunArgs,
    DSecMicroVMRunArgs,
    DSecVMRunArgs,
    ExecResult,
    Sandbox,
    ShellResult,
    ShellSession,
)

With = Dict[str, Any]


@dataclass
class Site:
    client: DSecClient
    url: str
    image: str
    folder: Path
    sandbox: Sandbox
    command: Optional[Command] = None
    shell: Optional[ShellSession] = None
    started: Optional["asyncio.Task[ShellResult]"] = None
    made: list[Sandbox] = field(default_factory=list)


def pattern(count: int) -> bytes:
    piece = b"some bytes\0\xff"
    return (piece * (count // len(piece) + 1))[:count]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_text() -> str:
    return f"{sha256(pattern(9_000_000))}\nsmall\nsmall\n0\n-rwxr-x---"


def result_view(result: CommandResult) -> With:
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "ok": result.ok,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "stdout_base64": base64.b64encode(result.stdout_raw).decode(),
        "stdout_count": len(result.stdout_raw),
        "stderr_count": len(result.stderr_raw),
        "stdout_sha256": sha256(result.stdout_raw),
        "stdout_missing": result.stdout_missing_bytes,
    }


def run_options(given: With) -> With:
    options = {name: given[name] for name in ("env", "cwd", "user", "check", "output_limit", "timeout") if name in given}
    if "input_base64" in given:
        options["input"] = base64.b64decode(given["input_base64"])
    if "input_bytes" in given:
        options["input"] = pattern(given["input_bytes"])
    return options


def end_view(result: ExecResult) -> With:
    return {"exit_code": result.exit_code, "signal": result.signal, "timed_out": result.timed_out}


def shell_view(result: ShellResult) -> With:
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "timed_out": result.timed_out,
        "lost": result.lost,
    }


def front(url: str, method: str = "GET", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/test/faults", method=method, data=data)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


async def run_shell(site: Site, given: With) -> With:
    return result_view(await site.sandbox.run_shell(given["command"], **run_options(given)))


async def run(site: Site, given: With) -> With:
    return result_view(await site.sandbox.run(given["args"], **run_options(given)))


async def exec_(site: Site, given: With) -> None:
    site.command = await site.sandbox.exec(
        given["args"], stdin=given.get("stdin", False), background=given.get("background", False)
    )


async def read_until(site: Site, given: With) -> None:
    seen = b""
    async for data in site.command.stream("stdout"):
        seen += data
        if given["text"].encode() in seen:
            return
    raise AssertionError(f"it ended with {seen!r}")


async def reattach(site: Site, given: With) -> None:
    site.command = site.client.attach(site.sandbox.id).command(site.command.id)


async def output_from(site: Site, given: With) -> With:
    stdout = b""
    async for part in site.command.output(stdout=given["stdout"], stderr=False):
        stdout += part.data
    return {"stdout": stdout.decode()}


async def command_again(site: Site, given: With) -> With:
    one = await site.sandbox.exec(["true"], request_id=given["request_id"])
    other = await site.sandbox.exec(["true"], request_id=given["request_id"])
    return {"same": one.id == other.id}


async def seen(site: Site, given: With) -> With:
    lines = front(site.url)["seen"]
    return {"count": sum(1 for line in lines if re.search(given["match"], line))}


async def wrong_token(site: Site, given: With) -> None:
    async with DSecClient(site.url, "wrong") as client:
        await client.list_sandboxes()


async def write(site: Site, given: With) -> None:
    content = base64.b64decode(given["base64"]) if "base64" in given else given["text"]
    await site.sandbox.files.write(given["path"], content, mode=given.get("mode"))


async def read(site: Site, given: With) -> With:
    data = await site.sandbox.files.read(given["path"])
    return {"text": data.decode("utf-8", "replace"), "base64": base64.b64encode(data).decode()}


async def read_stream(site: Site, given: With) -> With:
    count = 0
    async for data in site.sandbox.files.read_stream(given["path"], offset=given["offset"]):
        count += len(data)
    return {"count": count}


async def list_(site: Site, given: With) -> With:
    entries = await site.sandbox.files.list(given["path"])
    return {"entries": ",".join(sorted(f"{one.name} {one.kind}" for one in entries))}


async def make_tree(site: Site, given: With) -> None:
    tree = site.folder / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "empty-folder").mkdir()
    (tree / "big").write_bytes(pattern(9_000_000))
    (tree / "sub/small").write_text("small\n")
    (tree / "exec").write_text("#!/bin/sh\n")
    (tree / "exec").chmod(0o750)
    (tree / "link").symlink_to("sub/small")


async def download_tree(site: Site, given: With) -> With:
    back, tree = site.folder / "back", site.folder / "tree"
    await site.sandbox.files.download(given["from"], back)

    def listed(at: Path) -> list[str]:
        return sorted(str(one.relative_to(at)) for one in at.rglob("*"))

    same = (
        listed(back) == listed(tree)
        and (back / "big").read_bytes() == pattern(9_000_000)
        and os.readlink(back / "link") == "sub/small"
        and (back / "exec").stat().st_mode & 0o777 == 0o750
    )
    return {"same": same}


async def watch(site: Site, given: With) -> With:
    events = []
    found = await site.sandbox.files.watch(given["path"])
    await site.sandbox.files.write(given["then_write"], "x")
    async for one in found:
        events.append(f"{one.event} {one.path}")
        if one.path == "new":
            break
    await found.aclose()
    return {"events": ",".join(events)}


async def shell_open(site: Site, given: With) -> None:
    options = {name: value for name, value in given.items() if name != "terminal"}
    site.shell = await site.sandbox.open_shell(**options, **given.get("terminal", {}))


async def shell_run(site: Site, given: With) -> With:
    return shell_view(await site.shell.run(given["command"], timeout=given.get("timeout")))


async def shell_start(site: Site, given: With) -> None:
    site.started = asyncio.ensure_future(site.shell.run(given["command"]))


async def shell_expect(site: Site, given: With) -> With:
    wanted = re.compile(given["regex"]) if "regex" in given else given["text"]
    found = await site.shell.expect(wanted, timeout=given.get("timeout", 30))
    return {"match": found.match[0], "group": found.match[1] if len(found.match) > 1 else None}


async def state(site: Site, given: With) -> With:
    info = await site.sandbox.view()
    return {"state": info.state, "id": site.sandbox.id, "edge": site.sandbox.edge}


async def port(site: Site, given: With) -> None:
    await site.sandbox.files.write("/tmp/index.html", "from inside")
    args = ["busybox", "httpd", "-f", "-p", "8080", "-h", "/tmp"]
    async with await site.sandbox.exec(args, background=True), httpx.AsyncClient(trust_env=False) as http:
        for _ in range(300):
            told = await http.get(site.sandbox.get_url(8080, "/index.html"), headers=site.client.headers)
            if told.text == "from inside":
                return
            await asyncio.sleep(0.1)
    raise AssertionError(f"the port says {told.text}")


async def list_sandboxes(site: Site, given: With) -> With:
    listed = await site.client.list_sandboxes()
    own = any(one.id == site.sandbox.id for one in listed.sandboxes)
    return {"has_own": own, "unreachable": len(listed.unreachable)}


async def create(site: Site, given: With) -> None:
    fields = {"container_image": site.image, **{name: value for name, value in given.items() if name != "timeout"}}
    site.sandbox = await site.client.run_container(DSecContainerRunArgs(**fields), timeout=given.get("timeout"))
    site.made.append(site.sandbox)


async def batch(site: Site, given: With) -> With:
    items = [one async for one in site.client.run_containers(DSecContainerRunArgs(container_image=site.image), **given)]
    made = [one.sandbox for one in items if one.sandbox is not None]
    await asyncio.gather(*(one.remove(force=True) for one in made))
    indexes = ",".join(str(at) for at in sorted(one.index for one in items))
    return {"indexes": indexes, "ready": len(made), "ids": len({one.id for one in made})}


async def fork(site: Site, given: With) -> With:
    forks = await site.sandbox.fork(count=given["count"], memory=given.get("memory"))
    texts = await asyncio.gather(*(one.files.read_text(given["read"]) for one in forks))
    await asyncio.gather(*(one.remove(force=True) for one in forks))
    return {"count": len(forks), "texts": ",".join(texts)}


async def pause(site: Site, given: With) -> With:
    return {"paused_at": (await site.sandbox.pause()).paused_at}


def calls(work: Callable[[Site, With], Awaitable[Any]], view: Callable[[Any], With] = lambda _: {}):
    async def step(site: Site, given: With) -> With:
        return view(await work(site, given))

    return step


async def later(value: Any) -> Any:
    return value


async def fncall(site: Site, given: With) -> Any:
    done = await site.client.fncall.run(image=site.image, **given)
    step = done.run
    return {
        "status": done.status,
        "exit_code": None if step is None else step.exit_code,
        "stdout": None if step is None else step.stdout.decode(),
        "file": done.files.get("out.txt", b"").decode(),
    }


async def run_fncall(site: Site, given: With) -> Any:
    done = await site.client.run_fncall(DSecFnCallRunArgs(container_image=site.image, **given))
    return {"status": done.status, "stdout": None if done.run is None else done.run.stdout.decode()}


STEPS: Dict[str, Callable[[Site, With], Awaitable[Any]]] = {
    "run_shell": run_shell,
    "run": run,
    "exec": exec_,
    "write_stdin": lambda site, given: site.command.write(given["text"]),
    "close_stdin": lambda site, given: site.command.close_stdin(),
    "collect": calls(lambda site, given: site.command.collect(), result_view),
    "wait": calls(lambda site, given: site.command.wait(timeout=60), end_view),
    "signal": lambda site, given: site.command.signal(given["signal"]),
    "kill": lambda site, given: site.command.kill(),
    "read_until": read_until,
    "reattach": reattach,
    "output_from": output_from,
    "command_again": command_again,
    "fault": lambda site, given: later(front(site.url, "POST", given)),
    "clear": lambda site, given: later(front(site.url, "DELETE")),
    "seen": seen,
    "wrong_token": wrong_token,
    "mkdir": lambda site, given: site.sandbox.files.mkdir(given["path"], parents=given.get("parents", False)),
    "write": write,
    "read": read,
    "read_stream": read_stream,
    "stat": calls(lambda site, given: site.sandbox.files.stat(given["path"]), asdict),
    "list": list_,
    "rename": lambda site, given: site.sandbox.files.rename(given["from"], given["to"]),
    "remove": lambda site, given: site.sandbox.files.remove(given["path"], recursive=given.get("recursive", False)),
    "symlink": lambda site, given: site.sandbox.files.symlink(given["target"], given["path"]),
    "readlink": calls(lambda site, given: site.sandbox.files.readlink(given["path"]), lambda to: {"target": to}),
    "digest": calls(lambda site, given: site.sandbox.files.digest(given["path"]), lambda sha: {"sha256": sha}),
    "make_tree": make_tree,
    "upload_tree": lambda site, given: site.sandbox.files.upload(site.folder / "tree", given["to"]),
    "download_tree": download_tree,
    "watch": watch,
    "shell_open": shell_open,
    "shell_run": shell_run,
    "shell_start": shell_start,
    "shell_result": calls(lambda site, given: site.started, shell_view),
    "shell_expect": shell_expect,
    "shell_send": lambda site, given: site.shell.send(given["text"]),
    "shell_interrupt": lambda site, given: site.shell.interrupt(),
    "shell_resize": lambda site, given: site.shell.resize(given["rows"], given["columns"]),
    "shell_close": lambda site, given: site.shell.close(),
    "state": state,
    "pause": pause,
    "resume": lambda site, given: site.sandbox.resume(),
    "usage": calls(lambda site, given: site.sandbox.usage(), lambda usage: {"pids": str(usage["pids"])}),
    "clipboard_get": calls(lambda site, given: site.sandbox.screen.clipboard.text(), lambda text: {"text": text}),
    "clipboard_set": lambda site, given: site.sandbox.screen.clipboard.set_text(given["text"]),
    "network": calls(lambda site, given: site.sandbox.network(), lambda view: {"mode": view["mode"]}),
    "port": port,
    "list_sandboxes": list_sandboxes,
    "create": create,
    "get": lambda site, given: site.client.get_sandbox(given["id"]),
    "stop": lambda site, given: site.sandbox.stop(grace=0.5),
    "fncall": fncall,
    "run_fncall": run_fncall,
    "run_microvm": lambda site, given: site.client.run_microvm(DSecMicroVMRunArgs(image=site.image)),
    "run_vm": lambda site, given: site.client.run_vm(DSecVMRunArgs(image=site.image)),
    "batch": batch,
    "fork": fork,
    "pack_diff": calls(
        lambda site, given: site.sandbox.pack_diff(given["name"]),
        lambda image: {"name": image["name"], "digest": image["digest"]},
    ),
}
