"""Files of a sandbox. Paths are the sandbox's, absolute or from its root; no link leads out of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from typing import Any, AsyncGenerator, AsyncIterable, Callable, List, Mapping, Optional, Union

from .closing import closing
from .errors import DSecError, FileChanged, error_from, protocol_error
from .transport import BackOff, Transport, body_of, drain, parsed, within

LocalPath = Union[str, "PathLike[str]"]


@dataclass(frozen=True)
class FileStatus:
    #: `file`, `directory`, `symlink` or `other`.
    kind: str
    #: With the bits of the kind.
    mode: int
    uid: int
    gid: int
    links: int
    size: int
    blocks: int
    inode: str
    modified_ms: float

    @staticmethod
    def of(view: Mapping[str, Any]) -> FileStatus:
        return FileStatus(**_status_fields(view))


@dataclass(frozen=True)
class FileEntry(FileStatus):
    name: str = ""
    #: Where the name is no UTF-8.
    name_base64: Optional[str] = None


@dataclass(frozen=True)
class FileEvent:
    #: `made`, `changed`, `written`, `removed`, `moved-from`, `moved-to`, `attributes`, `overflow`, `gone`.
    event: str
    #: Below what is watched; empty: that itself.
    path: str
    directory: bool
    cookie: Optional[int] = None
    path_base64: Optional[str] = None


def _status_fields(view: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: view[name] for name in ("kind", "mode", "uid", "gid", "links", "size", "blocks", "inode")}
    return {**fields, "modified_ms": view["modifiedMs"]}


class SandboxFiles:
    def __init__(self, transport: Transport, sandbox_path: str) -> None:
        self._transport = transport
        self._path = f"{sandbox_path}/files"

    async def stat(self, path: str, *, timeout: Optional[float] = None) -> FileStatus:
        """Of a link itself. Raises FileError, SandboxGone; as all below."""
        return FileStatus.of(await self._json("GET", "/stat", {"path": path}, timeout))

    async def list(self, path: str, *, timeout: Optional[float] = None) -> List[FileEntry]:
        entries = await self._json("GET", "/list", {"path": path}, timeout)
        return [
            FileEntry(**_status_fields(one), name=one["name"], name_base64=one.get("nameBase64")) for one in entries
        ]

    async def read(self, path: str, *, timeout: Optional[float] = None) -> bytes:
        """The whole of it, in memory."""
        return await self._transport.call("GET", self._path, query={"path": path}, timeout=timeout)

    async def read_text(self, path: str, *, timeout: Optional[float] = None) -> str:
        return (await self.read(path, timeout=timeout)).decode("utf-8", "replace")

    async def read_stream(self, path: str, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """As it comes, over connections that break. A file that is replaced meanwhile is a FileChanged."""
        back_off = BackOff(self._transport.patience)
        at = offset
        tag: Optional[str] = None
        while True:
            try:
                response = await self._transport.once("GET", self._path, query={"path": path, "offset": at})
                now = response.headers.get("etag")
                tag = tag or now
                if now != tag:
                    await response.aclose()
                    raise FileChanged(f"{path} was changed while it was read", code="FILE_CHANGED", retryable=True)
                async with closing(body_of(response)) as body:
                    async for data in body:
                        back_off.progress()
                        at += len(data)
                        yield data
                return
            except DSecError as error:
                await back_off.after(error)

    async def write(
        self,
        path: str,
        content: Union[str, bytes, AsyncIterable[bytes]],
        *,
        mode: Optional[int] = None,
        timeout: Optional[float] = None,
    ) -> FileStatus:
        """In place of what is there: all of it, or nothing.

        What comes from an iterable cannot be sent again when the connection breaks: for large files, `upload`.
        """
        query = {"path": path, "mode": mode}
        if isinstance(content, (str, bytes)):
            data = content.encode() if isinstance(content, str) else content
            told = await self._transport.json("PUT", self._path, query=query, data=data, timeout=timeout)
            return FileStatus.of(told)
        source = content

        async def send() -> bytes:
            return await drain(await self._transport.once("PUT", self._path, query=query, data=_iterated(source)))

        return FileStatus.of(parsed(await within(timeout, send())))

    async def mkdir(
        self, path: str, *, parents: bool = False, mode: Optional[int] = None, timeout: Optional[float] = None
    ) -> None:
        """`parents`: those that are missing too, and no error when it is there."""
        await self._json("POST", "/mkdir", {"path": path, "recursive": parents or None, "mode": mode}, timeout)

    async def remove(self, path: str, *, recursive: bool = False, timeout: Optional[float] = None) -> None:
        await self._json("DELETE", "", {"path": path, "recursive": recursive or None}, timeout)

    async def rename(self, source: str, target: str, *, timeout: Optional[float] = None) -> None:
        body = {"from": source, "to": target}
        await self._transport.json("POST", f"{self._path}/rename", body=body, timeout=timeout)

    async def symlink(self, target: str, path: str, *, timeout: Optional[float] = None) -> None:
        body = {"from": target, "to": path}
        await self._transport.json("POST", f"{self._path}/symlink", body=body, timeout=timeout)

    async def readlink(self, path: str, *, timeout: Optional[float] = None) -> str:
        return str((await self._json("GET", "/link", {"path": path}, timeout))["target"])

    async def digest(self, path: str, *, timeout: Optional[float] = None) -> str:
        """sha256, in hexadecimal digits."""
        return str((await self._json("GET", "/digest", {"path": path}, timeout))["sha256"])

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncGenerator[FileEvent, None]:
        """Events as they come. Returns when all from now on will be told; ends when the iteration does."""
        lines = self._watch_lines(path, recursive)
        first = await lines.__anext__()
        if first.event != "watching":
            raise protocol_error("a watch that does not begin")
        return lines

    async def upload(
        self,
        source: LocalPath,
        target: str,
        *,
        concurrency: int = 8,
        on_skipped: Optional[Callable[[str], object]] = None,
    ) -> None:
        """A file, link or folder of this machine, to `target`, which it is then.

        Large files go on where they were when the connection breaks, and in another run too. Special files are left out, and told.
        """
        from .file_trees import upload_tree

        await upload_tree(self._transport, self, source, target, concurrency, on_skipped)

    async def download(
        self,
        source: str,
        target: LocalPath,
        *,
        concurrency: int = 8,
        on_skipped: Optional[Callable[[str], object]] = None,
    ) -> None:
        """And back. Owners are whoever calls."""
        from .file_trees import download_tree

        await download_tree(self, source, target, concurrency, on_skipped)

    @property
    def parts_path(self) -> str:
        return f"{self._path}/parts"

    async def _json(self, method: str, path: str, query: Mapping[str, Any], timeout: Optional[float]) -> Any:
        return await self._transport.json(method, f"{self._path}{path}", query=query, timeout=timeout)

    async def _watch_lines(self, path: str, recursive: bool) -> AsyncGenerator[FileEvent, None]:
        query = {"path": path, "recursive": recursive or None}
        url = f"{self._path}/watch"
        response = await self._transport.retrying(lambda: self._transport.once("GET", url, query=query))
        rest = b""
        async with closing(body_of(response)) as body:
            async for data in body:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not line.strip():
                        continue
                    news = json.loads(line)
                    if "error" in news:
                        raise error_from(news["error"])
                    yield FileEvent(
                        event=news["event"],
                        path=news.get("path", ""),
                        directory=news.get("directory", False),
                        cookie=news.get("cookie"),
                        path_base64=news.get("pathBase64"),
                    )


async def _iterated(source: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    async for data in source:
        yield data
