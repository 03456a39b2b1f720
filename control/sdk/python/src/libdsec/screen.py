"""The screen, keyboard, mouse and serial console of a full machine (`DSecVMRunArgs`). Others raise UnsupportedError."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence, Union

from .transport import Transport, drain, within


class SandboxClipboard:
    """What is copied and pasted in a guest with an agent of SPICE; others raise UnsupportedError. At most 4 MiB.

    `selection`: `clipboard`, or `primary` (X11: what is selected, pasted by the middle button).
    """

    def __init__(self, transport: Transport, sandbox_path: str) -> None:
        self._transport = transport
        self._path = f"{sandbox_path}/screen/clipboard"

    async def text(self, *, selection: str = "clipboard", timeout: Optional[float] = None) -> Optional[str]:
        """None: no text is there."""
        data = await self._get("text/plain", selection, timeout)
        return None if data is None else data.decode("utf-8", "replace")

    async def png(self, *, selection: str = "clipboard", timeout: Optional[float] = None) -> Optional[bytes]:
        """A picture, as PNG. None: none is there."""
        return await self._get("image/png", selection, timeout)

    async def set_text(self, text: str, *, selection: str = "clipboard", timeout: Optional[float] = None) -> None:
        """For whoever pastes in the guest."""
        await self._set("text/plain", text.encode(), selection, timeout)

    async def set_png(self, png: bytes, *, selection: str = "clipboard", timeout: Optional[float] = None) -> None:
        await self._set("image/png", png, selection, timeout)

    async def _get(self, kind: str, selection: str, timeout: Optional[float]) -> Optional[bytes]:
        async def work() -> Optional[bytes]:
            query = {"type": kind, "selection": selection}
            response = await self._transport.once("GET", self._path, query=query)
            data = await drain(response)
            return None if response.status_code == 204 else data

        return await within(timeout, self._transport.retrying(work))

    async def _set(self, kind: str, data: bytes, selection: str, timeout: Optional[float]) -> None:
        query = {"type": kind, "selection": selection}
        await self._transport.json("PUT", self._path, query=query, data=data, timeout=timeout)


class SandboxScreen:
    def __init__(self, transport: Transport, sandbox_path: str) -> None:
        self._transport = transport
        self._path = sandbox_path
        self.clipboard = SandboxClipboard(transport, sandbox_path)

    async def picture(self, *, timeout: Optional[float] = None) -> bytes:
        """What it shows now, as PNG."""
        return await self._transport.call("GET", f"{self._path}/screen", timeout=timeout)

    async def act(self, actions: Sequence[Mapping[str, Any]], *, timeout: Optional[float] = None) -> None:
        """In order; nothing is done when one of them cannot be. docs/vm.md lists them."""
        body = {"actions": list(actions)}
        await self._transport.json("POST", f"{self._path}/screen/input", body=body, timeout=timeout)

    async def type(self, text: str, *, timeout: Optional[float] = None) -> None:
        """ASCII, as on a keyboard of the United States."""
        await self.act([{"type": "text", "text": text}], timeout=timeout)

    async def press(self, *chords: str) -> None:
        """Each a key, or several held together: `ctrl+alt+delete`."""
        await self.act([{"type": "key", "keys": ["+"] if chord == "+" else chord.split("+")} for chord in chords])

    async def click(self, x: int, y: int, *, button: str = "left", count: int = 1) -> None:
        await self.act([{"type": "click", "x": x, "y": y, "button": button, "count": count}])

    async def move(self, x: int, y: int) -> None:
        await self.act([{"type": "move", "x": x, "y": y}])

    async def console_text(self, *, timeout: Optional[float] = None) -> str:
        """What the machine wrote to its serial console last, at most 64 KiB."""
        text = await self._transport.call("GET", f"{self._path}/console", timeout=timeout)
        return text.decode("utf-8", "replace")

    async def write_console(self, text: Union[str, bytes], *, timeout: Optional[float] = None) -> None:
        data = text.encode() if isinstance(text, str) else text
        await self._transport.json("POST", f"{self._path}/console", data=data, timeout=timeout)
