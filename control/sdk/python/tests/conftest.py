"""A service to test against, which the environment names: DSEC_API, DSEC_TOKEN, DSEC_TEST_IMAGE, DSEC_TEST_SCENARIOS. control/test/sdk-python.test.ts starts one."""

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    if "DSEC_TEST_IMAGE" not in os.environ:
        pytest.skip("no service to test against")
    return os.environ["DSEC_API"]


@pytest.fixture(scope="session")
def image() -> str:
    return os.environ["DSEC_TEST_IMAGE"]
