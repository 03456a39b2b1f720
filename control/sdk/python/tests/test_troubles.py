"""Where the scenarios do not reach: what is given up, services that die, memory, and the library without asyncio."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from typing import Any, AsyncIterator, Awaitable, Callable

import pytest

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    DSecTimeoutError,
    OutputPart,
    Sandbox,
    SandboxGone,
    sync,
)
from scenario_steps import front

Body = Callable[[DSecClient, Sandbox], Awaitable[None]]


@pytest.fixture
def play(url: str, image: str) -> Callable[[Body], None]:
    async def inside(body: Body) -> None:
        front(url, "DELETE")
        async with DSecClient() as client:
            async with await client.run_container(DSecContainerRunArgs(container_image=image)) as sandbox:
                await body(client, sandbox)
        front(url, "DELETE")

    return lambda body: asyncio.run(inside(body))


async def running(sandbox: Sandbox) -> int:
    return sum(1 for one in await sandbox.commands() if one.running)


def test_nothing_is_lost_or_doubled_when_the_service_is_killed_in_the_middle(play: Any, url: str) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        script = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); [ $((i%30)) = 0 ] && sleep 0.05; done; exit 4"
        command = await sandbox.exec(["sh", "-c", script])
        seen = b""
        killing = None
        async for data in command.stream("stdout"):
            seen += data
            if killing is None and len(seen) > 2000:
                killing = asyncio.ensure_future(asyncio.to_thread(front, url, "PUT"))
        assert killing is not None
        await killing
        assert seen.decode() == "".join(f"line {at}\n" for at in range(3000))
        assert command.result is not None and command.result.exit_code == 4

    play(body)


def test_no_command_is_left_running_when_it_is_cancelled(play: Any, url: str) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        begun = asyncio.Event()
        work = sandbox.run_shell("echo begun; sleep 1000 & sleep 1000", on_output=lambda _: begun.set())
        task = asyncio.ensure_future(work)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await running(sandbox) == 0
        # While it is being started.
        for timeout in (None, 0.3):
            front(url, "POST", {"match": "POST .*/commands$", "times": 1, "delayMs": 1500})
            if timeout is None:
                task = asyncio.ensure_future(sandbox.run_shell("sleep 1000"))
                await asyncio.sleep(0.3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(DSecTimeoutError):
                    await sandbox.exec(["sleep", "1000"], timeout=timeout)
            assert await running(sandbox) == 0

    play(body)


def test_no_sandbox_is_left_when_it_is_given_up_while_it_is_being_made(play: Any, url: str, image: str) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        front(url, "POST", {"match": "POST /v1/sandboxes$", "times": 1, "delayMs": 2000})
        args = DSecContainerRunArgs(container_image=image, name="given-up")
        with pytest.raises(DSecTimeoutError):
            await client.run_container(args, timeout=0.5)
        assert "given-up" not in [one.name for one in (await client.list_sandboxes()).sandboxes]

    play(body)


def test_waiting_does_not_end_what_is_waited_for_and_a_scope_does(play: Any) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        async with await sandbox.exec(["sleep", "1000"]) as command:
            with pytest.raises(DSecTimeoutError):
                await command.wait(timeout=0.2)
            assert (await command.view()).running
        assert await running(sandbox) == 0

    play(body)


def test_a_default_time_out_is_not_for_background_commands(play: Any, url: str) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        async with DSecClient(command_timeout=0.7) as impatient:
            same = impatient.attach(sandbox.id)
            assert (await same.run_shell("sleep 1000")).timed_out
            async with await same.exec(["sleep", "1000"], background=True) as background:
                assert (await same.run_shell("sleep 1", timeout=60)).exit_code == 0
                assert (await background.view()).running

    play(body)


def test_a_sandbox_that_ends_under_a_command_is_gone_and_no_failed_command(play: Any, image: str) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        other = await client.run_container(DSecContainerRunArgs(container_image=image))

        async def end(part: OutputPart) -> None:
            await other.stop(keep=True, grace=0)

        with pytest.raises(SandboxGone) as caught:
            await other.run_shell("echo begun; sleep 1000", check=True, on_output=end)
        assert caught.value.reason == "stopped"
        await other.remove(force=True)
        with pytest.raises(SandboxGone):
            await other.run_shell("true")

    play(body)


def test_input_from_an_iterator(play: Any) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for at in range(5):
                yield f"{at}\n".encode() * 1000

        assert (await sandbox.run(["wc", "-l"], input=parts())).stdout.strip() == "5000"

        async def bad() -> AsyncIterator[bytes]:
            yield b"one"
            raise OSError("the source has failed")

        assert (await sandbox.run(["cat"], input=bad())).exit_code == 137

    play(body)


def test_a_hundred_megabytes_do_not_grow_memory(play: Any) -> None:
    async def body(client: DSecClient, sandbox: Sandbox) -> None:
        command = await sandbox.exec(["head", "-c", "104857600", "/dev/zero"])
        count = before = 0
        async for part in command.output():
            count += len(part.data) - part.missing_bytes
            if before == 0 and count > 8 << 20:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert count == 100 << 20
        result = await sandbox.run(["head", "-c", "20971520", "/dev/zero"], output_limit=1 << 20)
        assert (len(result.stdout_raw), result.stdout_missing_bytes) == (1 << 20, 19 << 20)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000

    play(body)


def test_without_asyncio(url: str, image: str, tmp_path: Any) -> None:
    front(url, "DELETE")
    with sync.DSecClient() as client, client.run_container(DSecContainerRunArgs(container_image=image)) as sandbox:
        assert sandbox.run_shell("echo hello").stdout == "hello\n"
        assert sandbox.run(["wc", "-l"], input=(b"a\n" for _ in range(3))).stdout.strip() == "3"
        seen = []
        sandbox.run_shell("echo a", on_output=seen.append)
        assert [part.data for part in seen] == [b"a\n"]
        with sandbox.exec(["cat"], stdin=True) as command:
            command.write("one\n")
            command.close_stdin()
            assert b"".join(command.stream()) == b"one\n"
            assert command.wait().exit_code == 0
        with sandbox.exec(["sleep", "1000"]) as endless, endless.output() as output:
            endless.signal("SIGTERM")
            assert list(output) == []
            assert endless.wait().signal == "SIGTERM"
        with sandbox.open_shell(rows=24, columns=80) as shell:
            assert shell.run("X=7").exit_code == 0
            assert "7" in shell.run("echo $X").stdout
        sandbox.files.write("/tmp/a", [b"x", b"y"])
        assert b"".join(sandbox.files.read_stream("/tmp/a")) == b"xy"
        assert [one.name for one in sandbox.files.list("/tmp")] == ["a"]
        with sandbox.files.watch("/tmp") as watch:
            sandbox.files.write("/tmp/b", "x")
            assert next(watch).directory is False
        sandbox.files.download("/tmp", tmp_path / "t")
        assert (tmp_path / "t/a").read_text() == "xy"
        listed = client.list_sandboxes()
        assert sandbox.id in [one.id for one in listed.sandboxes]
        made = list(client.run_containers(DSecContainerRunArgs(container_image=image), count=2))
        assert sorted(one.index for one in made) == [0, 1]
        for item in made:
            assert item.sandbox is not None
            item.sandbox.remove(force=True)
        with pytest.raises(RuntimeError):
            sandbox.run_shell("echo a", on_output=lambda _: sandbox.run_shell("true"))


def test_ctrl_c_ends_what_was_being_run(url: str, image: str) -> None:
    script = """
import sys
from libdsec import DSecContainerRunArgs
from libdsec.sync import DSecClient
sandbox = DSecClient().attach(sys.argv[1])
sandbox.run_shell("echo begun; sleep 1000", on_output=lambda part: print(part.data.decode(), flush=True))
"""
    with sync.DSecClient() as client, client.run_container(DSecContainerRunArgs(container_image=image)) as sandbox:
        child = subprocess.Popen(
            [sys.executable, "-c", script, sandbox.id], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)
        assert "KeyboardInterrupt" in told
        assert [one.running for one in sandbox.commands()] == [False]


def test_listing_one_of_the_paper_as_printed(url: str, image: str) -> None:
    """Around it only what makes a program of it, and an image that is there; the network of its rules needs a machine that has one."""
    text = '''
client = DSecClient()
await client.open()
args = DSecContainerRunArgs(
    container_image="registry.../sphinx-9658:official",
    memory_limit_mb=4096, cpu_cores_limit=4,
    ttl_running_stop=300,   # idle timeout
    network_rules={"npm": False, "pypi": True},
    init_user="root",
)
sandbox = await client.run_container(args, timeout=120)
result = await sandbox.run_shell("echo hello world")
await sandbox.stop()
'''.replace("registry.../sphinx-9658:official", image)
    if os.environ.get("DSEC_TEST_NETWORK") != "yes":
        text = text.replace('    network_rules={"npm": False, "pypi": True},\n', "")
    inside = "\n".join(f"    {line}" for line in text.splitlines())
    names: dict[str, Any] = {"DSecClient": DSecClient, "DSecContainerRunArgs": DSecContainerRunArgs}
    exec(f"async def session():\n{inside}\n    return client, sandbox, result", names)

    async def body() -> None:
        client, sandbox, result = await names["session"]()
        assert (result.exit_code, result.stdout, result.stderr) == (0, "hello world\n", "")
        with pytest.raises(SandboxGone):
            await sandbox.view()
        await client.close()

    asyncio.run(body())
