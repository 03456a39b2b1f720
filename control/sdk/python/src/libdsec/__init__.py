"""libdsec: sandboxes of a DSec cluster. docs/sdk.md begins with an example; `libdsec.sync` has the same without asyncio."""

from .client import BatchItem, DSecClient, SandboxList
from .command import Command, CommandView
from .command_result import CommandResult, ExecResult
from .errors import (
    ERROR_TABLE,
    AuthenticationError,
    CommandFailed,
    CommandNotStarted,
    ConfigurationError,
    Conflict,
    ConnectionLost,
    DSecError,
    DSecTimeoutError,
    FileChanged,
    FileError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    PermissionDenied,
    ProtocolError,
    QuotaExceeded,
    RateLimited,
    SandboxGone,
    ServerError,
    ShellLost,
    Unavailable,
    UnsupportedError,
)
from .files import FileEntry, FileEvent, FileStatus, SandboxFiles
from .fncall import DSecFnCallRunArgs, FnCall, FnCallResult, FnCallStep
from .output_frames import OutputPart
from .run_args import (
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    DSecRunArgs,
    DSecVMRunArgs,
    NetworkPolicy,
    NetworkRules,
)
from .sandbox import PauseReport, Sandbox, SandboxInfo
from .shell import Expected, ShellResult, ShellSession

__version__ = "0.1.0"

__all__ = [
    "AuthenticationError",
    "BatchItem",
    "Command",
    "CommandFailed",
    "CommandNotStarted",
    "CommandResult",
    "CommandView",
    "ConfigurationError",
    "Conflict",
    "ConnectionLost",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DSecFnCallRunArgs",
    "DSecMicroVMRunArgs",
    "DSecRunArgs",
    "DSecTimeoutError",
    "DSecVMRunArgs",
    "ERROR_TABLE",
    "ExecResult",
    "Expected",
    "FileChanged",
    "FileEntry",
    "FileError",
    "FileEvent",
    "FileStatus",
    "FnCall",
    "FnCallResult",
    "FnCallStep",
    "InvalidRequest",
    "NetworkPolicy",
    "NetworkRules",
    "NoCapacity",
    "NotFound",
    "OutputPart",
    "PauseReport",
    "PermissionDenied",
    "ProtocolError",
    "QuotaExceeded",
    "RateLimited",
    "Sandbox",
    "SandboxFiles",
    "SandboxGone",
    "SandboxInfo",
    "SandboxList",
    "ServerError",
    "ShellLost",
    "ShellResult",
    "ShellSession",
    "Unavailable",
    "UnsupportedError",
]
