"""What a sandbox is to be, as callers say it, and as the API takes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Sequence, Union

from .errors import InvalidRequest
from .transport import without_none

#: Names of services (`pypi`), or hosts and ranges (`*.debian.org`, `10.0.0.0/8`): whether they may be reached. Nothing else may.
NetworkRules = Mapping[str, bool]
#: docs/network.md has its form.
NetworkPolicy = Mapping[str, Any]
Env = Union[Mapping[str, str], Sequence[str]]


@dataclass
class DSecRunArgs:
    """`image`, as `container_image` of a container, is the one thing that has to be given."""

    #: MiB.
    memory_limit_mb: Optional[float] = None
    cpu_cores_limit: Optional[float] = None
    #: MiB.
    disk_limit_mb: Optional[float] = None
    pids_limit: Optional[int] = None
    #: Seconds: when nobody has used it for so long, it ends.
    ttl_running_stop: Optional[float] = None
    #: What happens then: `stop`, the default, or `pause`.
    idle_action: Optional[str] = None
    #: Seconds that it lives at most, used or not.
    ttl_seconds: Optional[float] = None
    network_rules: Optional[NetworkRules] = None
    #: In place of `network_rules`: all that a policy can say.
    network_policy: Optional[NetworkPolicy] = None
    #: `none` when neither rules nor a policy are given; or `host`.
    network_mode: Optional[str] = None
    init_user: Optional[str] = None
    workdir: Optional[str] = None
    env: Optional[Env] = None
    workspace: Optional[str] = None
    toolkits: Optional[Sequence[str]] = None
    store: Optional[str] = None
    name: Optional[str] = None
    project: Optional[str] = None
    job: Optional[str] = None
    #: The same one gives the same sandbox; made anew when it is left out.
    request_id: Optional[str] = None
    #: `ls`, latency-sensitive, or `be`, best effort.
    service_class: Optional[str] = None
    #: Of nodes that may have it.
    labels: Optional[Sequence[str]] = None
    #: On a node that has no other user's sandboxes.
    alone: Optional[bool] = None
    #: Graphics processors of its own.
    gpus: Optional[int] = None
    #: `h100-80gb-hbm3`: one unless `gpus` says more.
    gpu_kind: Optional[str] = None
    userns: Optional[str] = None
    runtime: Optional[str] = None
    #: Further ones (`io_read_bps`, ...), above those before.
    limits: Optional[Mapping[str, float]] = None


@dataclass
class DSecContainerRunArgs(DSecRunArgs):
    container_image: str = ""


@dataclass
class DSecMicroVMRunArgs(DSecRunArgs):
    image: str = ""


@dataclass
class DSecVMRunArgs(DSecRunArgs):
    image: str = ""
    #: `bios` by default, or `uefi`.
    firmware: Optional[str] = None
    #: Of its screen: 1024 x 768 by default.
    width: Optional[int] = None
    height: Optional[int] = None


def create_body(backend: str, args: DSecRunArgs, request_id: str) -> Dict[str, Any]:
    image = getattr(args, "container_image", "") or getattr(args, "image", "")
    if not image:
        raise InvalidRequest("no image was given", code="INVALID_ARGUMENT")
    return {
        **without_none(
            backend=None if backend == "container" else backend,
            image=image,
            store=args.store,
            workspace=args.workspace,
            toolkits=None if args.toolkits is None else list(args.toolkits),
            name=args.name,
            requestId=args.request_id or request_id,
            project=args.project,
            job=args.job,
            env=env_of(args.env),
            user=args.init_user,
            workdir=args.workdir,
            ttlMs=milliseconds(args.ttl_seconds),
            idleMs=milliseconds(args.ttl_running_stop),
            idleAction=args.idle_action,
            cpus=args.cpu_cores_limit,
            memoryBytes=mebibytes(args.memory_limit_mb),
            diskBytes=mebibytes(args.disk_limit_mb),
            pids=args.pids_limit,
            network=_network_of(args),
            machine=_machine_of(args),
            userns=args.userns,
            runtime=args.runtime,
            labels=None if args.labels is None else list(args.labels),
            alone=args.alone,
            gpus=args.gpus,
            gpuKind=args.gpu_kind,
        ),
        **({} if args.service_class is None else {"class": args.service_class}),
        **{camel(key): value for key, value in (args.limits or {}).items()},
    }


def _machine_of(args: DSecRunArgs) -> Optional[Dict[str, Any]]:
    if not isinstance(args, DSecVMRunArgs):
        return None
    return without_none(firmware=args.firmware, width=args.width, height=args.height) or None


def policy_of(rules: NetworkRules) -> Dict[str, Any]:
    services: Dict[str, bool] = {}
    targets = []
    for name, allowed in rules.items():
        if re.search(r"[.:/*]", name):
            targets.append({"allow" if allowed else "deny": name})
        else:
            services[name] = allowed
    return {"default": "deny", "rules": targets, "services": services}


def _network_of(args: DSecRunArgs) -> Optional[Dict[str, Any]]:
    if args.network_rules is not None and args.network_policy is not None:
        raise InvalidRequest("network_rules and network_policy: give one of them", code="INVALID_ARGUMENT")
    policy = args.network_policy
    if args.network_rules is not None:
        policy = policy_of(args.network_rules)
    if policy is None:
        return None if args.network_mode is None else {"mode": args.network_mode}
    return {"mode": args.network_mode or "policy", "policy": policy}


def env_of(env: Optional[Env]) -> Optional[list[str]]:
    if env is None:
        return None
    if isinstance(env, Mapping):
        return [f"{key}={value}" for key, value in env.items()]
    return list(env)


def milliseconds(seconds: Optional[float]) -> Optional[int]:
    return None if seconds is None else round(seconds * 1000)


def mebibytes(count: Optional[float]) -> Optional[int]:
    return None if count is None else round(count * 2**20)


def camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found.group(1).upper(), name)
