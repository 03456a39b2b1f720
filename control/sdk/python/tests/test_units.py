"""What needs no service: errors, arguments, contexts, what is kept of output."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from pathlib import Path
from typing import Any, AsyncIterator

import pytest

import libdsec
from libdsec import ERROR_TABLE, ConfigurationError, DSecContainerRunArgs, InvalidRequest, OutputPart, ProtocolError
from libdsec.command_result import Collector
from libdsec.context import find_endpoint
from libdsec.errors import error_from
from libdsec.output_frames import only_new, parse_frames
from libdsec.run_args import create_body

ERRORS = Path(os.environ.get("DSEC_TEST_ERRORS", Path(__file__).parents[2] / "errors.json"))


def test_errors_are_those_of_the_table_that_both_libraries_share() -> None:
    rows = json.loads(ERRORS.read_text())
    made = [(kind.__name__, list(codes), list(statuses)) for kind, codes, statuses in ERROR_TABLE]
    assert [(row["class"], row["codes"], row["statuses"]) for row in rows][: len(made)] == made
    for row in rows:
        assert issubclass(getattr(libdsec, row["class"]), libdsec.DSecError)


def test_errors_say_why_a_sandbox_is_gone_and_which_backend_there_is_not() -> None:
    gone = error_from({"code": "SANDBOX_GONE", "message": "sandbox a.b is gone: expired: its time was over"}, status=410)
    assert isinstance(gone, libdsec.SandboxGone) and gone.reason == "expired"
    never = error_from({"code": "SANDBOX_GONE", "message": "sandbox a.b is gone: its edge has none"}, status=410)
    assert isinstance(never, libdsec.SandboxGone) and never.reason is None
    other = error_from({"code": "RUNTIME_UNSUPPORTED", "message": "backend vm cannot do this: it has no pause"})
    assert isinstance(other, libdsec.UnsupportedError) and other.backend == "vm"


def test_run_arguments_become_a_request() -> None:
    args = DSecContainerRunArgs(
        container_image="sphinx:official",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True, "*.debian.org": True, "10.0.0.0/8": False},
        init_user="root",
        env={"A": "1"},
        limits={"io_read_bps": 5},
    )
    assert create_body("container", args, "r") == {
        "image": "sphinx:official",
        "requestId": "r",
        "env": ["A=1"],
        "user": "root",
        "idleMs": 300_000,
        "cpus": 4,
        "memoryBytes": 4096 * 2**20,
        "ioReadBps": 5,
        "network": {
            "mode": "policy",
            "policy": {
                "default": "deny",
                "rules": [{"allow": "*.debian.org"}, {"deny": "10.0.0.0/8"}],
                "services": {"npm": False, "pypi": True},
            },
        },
    }
    args.network_policy = {}
    with pytest.raises(InvalidRequest):
        create_body("container", args, "r")
    with pytest.raises(InvalidRequest):
        create_body("container", DSecContainerRunArgs(), "r")


def test_the_ends_of_output_are_kept_and_the_rest_is_counted() -> None:
    kept = Collector(8)
    for text in (b"abc", b"defghi", b"jk", b"lmnopqrst"):
        kept.add(text)
    assert kept.collected() == (b"abcdqrst", 12)
    gap = Collector(8)
    gap.add(b"ab")
    gap.skip(100)
    gap.add(b"cd")
    assert gap.collected() == (b"abcd", 100)


def test_of_output_that_comes_again_what_is_new_is_taken() -> None:
    at = {"stdout": 5, "stderr": 0}
    assert list(only_new(OutputPart("stdout", 0, b"abc"), at)) == []
    assert list(only_new(OutputPart("stdout", 3, b"defg"), at)) == [OutputPart("stdout", 5, b"fg")]
    assert list(only_new(OutputPart("stdout", 9, b"j"), at)) == [
        OutputPart("stdout", 7, missing_bytes=2),
        OutputPart("stdout", 9, b"j"),
    ]
    assert list(only_new(OutputPart("stdout", 8, missing_bytes=4), at)) == [OutputPart("stdout", 10, missing_bytes=2)]


def test_frames_are_found_however_they_are_cut_and_bad_ones_are_told() -> None:
    def frame(kind: int, payload: bytes) -> bytes:
        return struct.pack("<IB", len(payload), kind) + payload

    async def read(data: bytes, size: int) -> list[Any]:
        async def source() -> AsyncIterator[bytes]:
            for at in range(0, len(data), size):
                yield data[at : at + size]

        return [one async for one in parse_frames(source())]

    whole = frame(1, struct.pack("<Q", 7) + b"abc") + frame(3, struct.pack("<BQQ", 2, 1, 5)) + frame(4, b'{"exitCode": 3}')
    for size in (1, 2, 5, 1000):
        part, missing, result = asyncio.run(read(whole, size))
        assert part == OutputPart("stdout", 7, b"abc")
        assert missing == OutputPart("stderr", 1, missing_bytes=5)
        assert result.exit_code == 3
    for bad in (frame(9, b""), frame(1, b"abc"), frame(4, b"{"), b"\xff\xff\xff\x7f\x01", frame(4, b"{}")):
        with pytest.raises(ProtocolError):
            asyncio.run(read(bad, 1000))


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DSEC_API", "DSEC_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "dsec").mkdir()
    (tmp_path / "dsec/token").write_text("of-the-file\n")
    file = tmp_path / "dsec/contexts.json"
    known = {
        "here": {"url": "http://127.0.0.1:7300/", "tokenFile": "token"},
        "there": {"url": "https://dsec.example", "token": "of-there"},
    }
    file.write_text(json.dumps({"current": "here", "contexts": known}))
    return file


def found(*args: Any, **named: Any) -> tuple[str, Any]:
    endpoint = find_endpoint(*args, **named)
    return endpoint.url, endpoint.token


def test_the_api_is_found(contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == ("http://127.0.0.1:7300", "of-the-file")
    assert found(context="there") == ("https://dsec.example", "of-there")
    monkeypatch.setenv("DSEC_TOKEN", "of-the-environment")
    assert found() == ("http://127.0.0.1:7300", "of-the-environment")
    monkeypatch.setenv("DSEC_API", "http://elsewhere:1")
    assert found() == ("http://elsewhere:1", "of-the-environment")
    assert found("http://given:2/x/", "t") == ("http://given:2/x", "t")
    assert found(context="there") == ("https://dsec.example", "of-there")


def test_the_token_of_a_context_goes_to_no_other_url(contexts: Path) -> None:
    assert found("http://elsewhere:1") == ("http://elsewhere:1", None)
    assert found("http://127.0.0.1:7300") == ("http://127.0.0.1:7300", "of-the-file")


def test_what_is_missing_is_said(contexts: Path) -> None:
    with pytest.raises(ConfigurationError, match="no context nowhere"):
        find_endpoint(context="nowhere")
    for url in ("nonsense", "ftp://x", "http://x:port", "http://"):
        with pytest.raises(ConfigurationError):
            find_endpoint(url, "t")
    contexts.write_text("{")
    with pytest.raises(ConfigurationError, match="is no JSON"):
        find_endpoint()
    contexts.unlink()
    with pytest.raises(ConfigurationError, match="no API to talk to"):
        find_endpoint()
