"""Files and folders into a sandbox and out of it.

Each file is sent with its size and sha256, goes on where it was when the connection breaks (in another run too, for it is known by these), and is at
its place only when it is right. Special files are left out, and told.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Any, AsyncGenerator, Awaitable, Callable, Dict, List, Optional

from .closing import closing
from .errors import DSecError, FileChanged, FileError
from .files import FileStatus, LocalPath, SandboxFiles
from .transport import BackOff, Transport, drain, parsed

#: From here on it is worth a question whether part of it is there.
_LARGE_BYTES = 4 << 20
_READ_BYTES = 256 << 10
_AGAIN_S = 0.2

Work = Callable[[], Awaitable[None]]
OnSkipped = Optional[Callable[[str], object]]


async def upload_tree(
    transport: Transport, files: SandboxFiles, source: LocalPath, target: str, concurrency: int, on_skipped: OnSkipped
) -> None:
    work: List[Work] = []

    async def walk(local: Path, remote: str) -> None:
        found = local.lstat()
        if stat.S_ISREG(found.st_mode):
            work.append(lambda: _send_file(transport, files, local, remote, found))
        elif stat.S_ISLNK(found.st_mode):
            link = os.readlink(local)
            work.append(lambda: _replace_link(files, link, remote))
        elif stat.S_ISDIR(found.st_mode):
            await files.mkdir(remote, parents=True, mode=found.st_mode & 0o7777)
            for name in sorted(os.listdir(local)):
                await walk(local / name, f"{remote.rstrip('/')}/{name}")
        elif on_skipped is not None:
            on_skipped(str(local))

    await walk(Path(source), target)
    await _all_of(work, concurrency)


async def _send_file(
    transport: Transport, files: SandboxFiles, local: Path, remote: str, found: os.stat_result
) -> None:
    size = found.st_size
    spec: Dict[str, Any] = {
        "path": remote,
        "size": size,
        "sha256": await asyncio.to_thread(_sha256_of, local, size),
        "mode": found.st_mode & 0o7777,
        "modifiedMs": found.st_mtime_ns / 1e6,
    }
    back_off = BackOff(transport.patience)
    ask = size >= _LARGE_BYTES
    best = -1
    while True:
        try:
            offset = 0
            if ask:
                state = await transport.json("GET", files.parts_path, query=spec)
                if state["complete"]:
                    return
                offset = state["offset"]
            if offset > best:
                back_off.progress()
            best = max(best, offset)
            ask = True
            query = {**spec, "offset": offset}
            async with closing(_read_file(local, offset, size)) as data:
                told = parsed(await drain(await transport.once("PUT", files.parts_path, query=query, data=data)))
            if told["complete"]:
                return
        except DSecError as error:
            # More, or less, of it is there than was known.
            if error.code == "RUNTIME_UPLOAD_OFFSET":
                await asyncio.sleep(_AGAIN_S)
            else:
                await back_off.after(error)


async def _read_file(path: Path, offset: int, size: int) -> AsyncGenerator[bytes, None]:
    with open(path, "rb") as file:
        file.seek(offset)
        left = size - offset
        while left > 0:
            data = await asyncio.to_thread(file.read, min(left, _READ_BYTES))
            if not data:
                return
            left -= len(data)
            yield data


async def _replace_link(files: SandboxFiles, target: str, path: str) -> None:
    try:
        await files.symlink(target, path)
    except FileError:
        await files.remove(path)
        await files.symlink(target, path)


async def download_tree(
    files: SandboxFiles, source: str, target: LocalPath, concurrency: int, on_skipped: OnSkipped
) -> None:
    work: List[Work] = []

    async def walk(remote: str, local: Path, status: FileStatus) -> None:
        if status.kind == "file":
            work.append(lambda: _fetch_file(files, remote, local, status))
        elif status.kind == "symlink":
            link = await files.readlink(remote)
            if local.is_symlink() or local.exists():
                local.unlink()
            local.symlink_to(link)
        elif status.kind == "directory":
            # A folder, and no link to one: that might lead anywhere.
            if local.is_symlink():
                local.unlink()
            local.mkdir(parents=True, exist_ok=True)
            for entry in await files.list(remote):
                name = entry.name
                if entry.name_base64 is not None or name in ("", ".", "..") or "/" in name or "\0" in name:
                    raise FileError(f"{remote}: an entry whose name cannot be had here: {name!r}", code="RUNTIME_FILE")
                await walk(f"{remote.rstrip('/')}/{name}", local / name, entry)
        elif on_skipped is not None:
            on_skipped(remote)

    await walk(source, Path(target), await files.stat(source))
    await _all_of(work, concurrency)


async def _fetch_file(files: SandboxFiles, remote: str, local: Path, status: FileStatus) -> None:
    size = status.size
    sha256 = await files.digest(remote) if size >= _LARGE_BYTES else None
    # Named by what it shall be, and so what another run goes on with.
    part = local.parent / f".dsec-part-{(sha256 or secrets.token_hex(8))[:32]}"
    keep = sha256 is not None
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(part, flags, 0o600)
    try:
        offset = os.fstat(descriptor).st_size
        if offset > size:
            os.ftruncate(descriptor, 0)
            offset = 0
        if offset < size:
            async with closing(files.read_stream(remote, offset=offset)) as stream:
                async for data in stream:
                    await asyncio.to_thread(_write_all, descriptor, data)
        came = os.fstat(descriptor).st_size
        if sha256 is not None and await asyncio.to_thread(_sha256_of, part, came) != sha256:
            keep = False
            raise FileChanged(f"{remote} was changed while it was copied", code="FILE_CHANGED", retryable=True)
        os.chmod(part, status.mode & 0o777)
        os.utime(part, (status.modified_ms / 1000, status.modified_ms / 1000))
        os.replace(part, local)
    except BaseException:
        if not keep and part.exists():
            part.unlink()
        raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view) > 0:
        view = view[os.write(descriptor, view) :]


def _sha256_of(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        left = size
        while left > 0:
            data = file.read(min(left, 1 << 20))
            if not data:
                break
            left -= len(data)
            digest.update(data)
    return digest.hexdigest()


async def _all_of(work: List[Work], concurrency: int) -> None:
    left = iter(work)

    async def worker() -> None:
        for one in left:
            await one()

    workers = [asyncio.ensure_future(worker()) for _ in range(max(1, min(concurrency, len(work))))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
