"""control/sdk/scenarios.json, which the TypeScript library runs too."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any, Dict

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, DSecError
from scenario_steps import STEPS, Site, front, pattern, sha256, tree_text

SCENARIOS = json.loads(Path(os.environ.get("DSEC_TEST_SCENARIOS", Path(__file__).parents[2] / "scenarios.json")).read_text())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one["name"])
def test_scenario(scenario: Dict[str, Any], url: str, image: str, tmp_path: Path) -> None:
    asyncio.run(play(scenario, url, image, tmp_path))


async def play(scenario: Dict[str, Any], url: str, image: str, folder: Path) -> None:
    front(url, "DELETE")
    async with DSecClient() as client:
        async with await client.run_container(DSecContainerRunArgs(container_image=image)) as sandbox:
            site = Site(client, url, image, folder, sandbox)
            try:
                for at, step in enumerate(scenario["steps"], 1):
                    await take(site, step, f"step {at}: {step['do']} {step.get('with', {})}")
            finally:
                front(url, "DELETE")
                for one in site.made:
                    await one.remove(force=True)


async def take(site: Site, step: Dict[str, Any], label: str) -> None:
    work = STEPS[step["do"]](site, step.get("with", {}))
    if "raises" not in step:
        given = await work
        check(given or {}, step.get("gives", {}), label)
        return
    with pytest.raises(DSecError) as caught:
        await work
    error = caught.value
    result = getattr(error, "result", None)
    view = {"class": type(error).__name__, **vars(error)}
    if result is not None:
        view.update(exit_code=result.exit_code, stdout=result.stdout, timed_out=result.timed_out)
    check(view, step["raises"], label)


def check(given: Dict[str, Any], wanted: Dict[str, Any], label: str) -> None:
    for key, value in wanted.items():
        actual = given.get(key)
        if isinstance(value, str) and value.startswith("re:"):
            # In JavaScript `$` is the very end.
            assert re.search(re.sub(r"\$$", r"\\Z", value[3:]), str(actual)), f"{label}: {key}: {actual}"
        else:
            assert actual == meant(value), f"{label}: {key}"


def meant(value: Any) -> Any:
    if value == "$tree":
        return tree_text()
    if isinstance(value, str) and value.startswith("$pattern:"):
        return sha256(pattern(int(value[9:])))
    if isinstance(value, str) and value.startswith("$zs:"):
        return sha256(b"z" * int(value[4:]))
    return value
