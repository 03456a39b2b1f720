"""control/sdk/backend-scenarios.json, which the TypeScript library runs too: the same calls, with nothing but the backend's name changed."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from libdsec import DSecClient, DSecError, DSecMicroVMRunArgs
from scenario_steps import Site
from test_scenarios import check, take

FILE = os.environ.get("DSEC_TEST_BACKEND_SCENARIOS", Path(__file__).parents[2] / "backend-scenarios.json")
#: By kind: `container` and `disk`. Without it there is no service that has them.
IMAGES: Dict[str, str] = json.loads(os.environ.get("DSEC_TEST_BACKEND_IMAGES", "{}"))
THERE = os.environ.get("DSEC_TEST_BACKENDS", "").split(",")


def rows() -> List[Tuple[str, Dict[str, Any]]]:
    scenarios = json.loads(Path(FILE).read_text()) if IMAGES else []
    return [(backend, one) for one in scenarios for backend in one["backends"] if backend in THERE]


@pytest.mark.parametrize("backend, scenario", rows(), ids=lambda one: one if isinstance(one, str) else one["name"])
def test_backend(backend: str, scenario: Dict[str, Any], url: str, tmp_path: Path) -> None:
    asyncio.run(play(backend, scenario, url, tmp_path))


async def play(backend: str, scenario: Dict[str, Any], url: str, folder: Path) -> None:
    image = IMAGES[scenario["image"]]
    args = DSecMicroVMRunArgs(image=image, memory_limit_mb=192, cpu_cores_limit=1)
    async with DSecClient() as client:
        if "raises" in scenario:
            with pytest.raises(DSecError) as caught:
                await client.run(backend, args)
            check({"class": type(caught.value).__name__, **vars(caught.value)}, scenario["raises"], backend)
            return
        async with await client.run(backend, args) as sandbox:
            site = Site(client, url, image, folder, sandbox)
            for at, step in enumerate(scenario["steps"], 1):
                await take(site, step, f"{backend}, step {at}: {step['do']}")
