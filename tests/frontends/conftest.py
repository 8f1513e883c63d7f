"""Tests of front-ends live here, a folder per library. A folder whose library is missing is not collected: `make test` leaves
it to `make test-frontends`, whose environment has them all."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.pools import keep_closed

NEEDS = {
    "jax": "jax",
    "envpool": "envpool",
    "mo_gymnasium": "mo_gymnasium",
    "sb3": "stable_baselines3",
    "test_texts.py": "textarena",
    "tianshou": "tianshou",
    "torchrl": "torchrl",
}  # folder: module
if sys.version_info >= (3, 15):  # dm-env and PettingZoo have no wheels yet, as scripts/test_versions.py says
    NEEDS |= {"test_dm_env.py": "dm_env", "test_keywords.py": "dm_env", "test_pettingzoo.py": "pettingzoo"}

collect_ignore = [str(Path(__file__).parent / folder) for folder, module in NEEDS.items() if find_spec(module) is None]


@pytest.fixture
def made():
    """Closes at the end of the test what it is given: `env = made(Env())`."""
    yield from keep_closed(lambda one: one)
