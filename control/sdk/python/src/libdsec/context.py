"""Where the API is and who calls it.

What was given, else $DSEC_API and $DSEC_TOKEN, else the current context of ~/.config/dsec/contexts.json, the file that `dsec context` keeps. A
context's token is never sent to another URL.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Tuple
from urllib.parse import urlsplit

from .errors import ConfigurationError


@dataclass(frozen=True)
class Endpoint:
    url: str
    token: Optional[str]
    #: Path of the certificates of the API's own authority.
    ca: Optional[str]


def find_endpoint(
    url: Optional[str] = None,
    token: Optional[str] = None,
    context: Optional[str] = None,
    ca: Optional[str] = None,
) -> Endpoint:
    if context is None:
        url = url or os.environ.get("DSEC_API") or None
        token = token or os.environ.get("DSEC_TOKEN") or None
    if url is not None and token is not None:
        return Endpoint(_checked(url), token, ca)
    path = contexts_path()
    name, chosen = _read_context(path, context, needed=url is None)
    if url is not None:
        # Given without a token: the context's own, when it is of this very API.
        own = chosen.get("url")
        if not isinstance(own, str) or _checked(own) != _checked(url):
            return Endpoint(_checked(url), None, ca)
        return Endpoint(_checked(url), _token_of(chosen, path), ca or _relative(path, chosen.get("ca")))
    own = chosen.get("url")
    if not isinstance(own, str):
        raise _problem(f"context {name} of {path} has no url")
    return Endpoint(_checked(own), token or _token_of(chosen, path), ca or _relative(path, chosen.get("ca")))


def contexts_path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "dsec" / "contexts.json"


def _read_context(path: Path, name: Optional[str], needed: bool) -> Tuple[str, Mapping[str, Any]]:
    try:
        content = path.read_text("utf-8")
    except OSError as error:
        if not needed:
            return "", {}
        raise _problem(f"there is no API to talk to: neither a URL nor $DSEC_API nor {path}") from error
    try:
        file = json.loads(content)
    except ValueError as error:
        raise _problem(f"{path} is no JSON") from error
    file = file if isinstance(file, dict) else {}
    chosen = name if name is not None else file.get("current")
    contexts = file.get("contexts")
    found = contexts.get(chosen) if isinstance(contexts, dict) and isinstance(chosen, str) else None
    if not isinstance(found, dict):
        if not needed:
            return "", {}
        raise _problem(f"{path} has no current context" if chosen is None else f"{path} has no context {chosen}")
    return str(chosen), found


def _token_of(context: Mapping[str, Any], path: Path) -> Optional[str]:
    token = context.get("token")
    if isinstance(token, str):
        return token
    file = _relative(path, context.get("tokenFile"))
    if file is None:
        return None
    try:
        return Path(file).read_text("utf-8").strip()
    except OSError as error:
        raise _problem(f"the token cannot be read from {file}") from error


def _relative(path: Path, file: object) -> Optional[str]:
    return str(path.parent / Path(file).expanduser()) if isinstance(file, str) else None


def _checked(url: str) -> str:
    """Without a slash at its end."""
    try:
        parts = urlsplit(url)
        parts.port
    except ValueError as error:
        raise _problem(f"{url} is no URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _problem(f"{url} is no http or https URL")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _problem(message: str) -> ConfigurationError:
    return ConfigurationError(message, code="CONFIGURATION", hint="run `dsec context`, or set $DSEC_API and $DSEC_TOKEN")
