"""The screen of a full machine, without asyncio; for `libdsec.sync`."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence, Union

from . import screen as _screen
from .sync_thread import run


class SandboxClipboard:
    def __init__(self, inner: _screen.SandboxClipboard) -> None:
        self._inner = inner

    def text(self, *, selection: str = "clipboard", timeout: Optional[float] = None) -> Optional[str]:
        return run(self._inner.text(selection=selection, timeout=timeout))

    def png(self, *, selection: str = "clipboard", timeout: Optional[float] = None) -> Optional[bytes]:
        return run(self._inner.png(selection=selection, timeout=timeout))

    def set_text(self, text: str, *, selection: str = "clipboard", timeout: Optional[float] = None) -> None:
        run(self._inner.set_text(text, selection=selection, timeout=timeout))

    def set_png(self, png: bytes, *, selection: str = "clipboard", timeout: Optional[float] = None) -> None:
        run(self._inner.set_png(png, selection=selection, timeout=timeout))


class SandboxScreen:
    def __init__(self, inner: _screen.SandboxScreen) -> None:
        self._inner = inner
        self.clipboard = SandboxClipboard(inner.clipboard)

    def picture(self, *, timeout: Optional[float] = None) -> bytes:
        return run(self._inner.picture(timeout=timeout))

    def act(self, actions: Sequence[Mapping[str, Any]], *, timeout: Optional[float] = None) -> None:
        run(self._inner.act(actions, timeout=timeout))

    def type(self, text: str, *, timeout: Optional[float] = None) -> None:
        run(self._inner.type(text, timeout=timeout))

    def press(self, *chords: str) -> None:
        run(self._inner.press(*chords))

    def click(self, x: int, y: int, *, button: str = "left", count: int = 1) -> None:
        run(self._inner.click(x, y, button=button, count=count))

    def move(self, x: int, y: int) -> None:
        run(self._inner.move(x, y))

    def console_text(self, *, timeout: Optional[float] = None) -> str:
        return run(self._inner.console_text(timeout=timeout))

    def write_console(self, text: Union[str, bytes], *, timeout: Optional[float] = None) -> None:
        run(self._inner.write_console(text, timeout=timeout))
