"""Faults of DI-engine's managers that were reproduced: each test fails with the originals, and passes with ours."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import time
from typing import Any

import pytest

from stepmill.frontends import di_engine

HAS_DING = importlib.util.find_spec("ding") is not None
LONG_S = 3.0

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of DI-engine, and of what it imports
    pytest.mark.skipif(not HAS_DING, reason="DI-engine is not installed; make test-originals has it"),
]
FAULTY = pytest.param(
    "original",
    marks=pytest.mark.xfail(strict=True, reason="the fault is there", raises=(AssertionError, EOFError, TypeError)),
)


@pytest.fixture(params=[FAULTY, "ours"])
def managers(request: pytest.FixtureRequest) -> Any:
    """The module that has the managers under test."""
    if request.param == "ours":
        return di_engine
    return importlib.import_module("ding.envs.env_manager.subprocess_env_manager")


@pytest.mark.covers("D-B1", "D-10")
def test_wait_returns_when_wait_num_is_met(managers: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send("answer")
    other, silent = multiprocessing.Pipe()
    began = time.monotonic()
    ready, places = managers.AsyncSubprocessEnvManager.wait([ours, other], 1, LONG_S)
    took_s = time.monotonic() - began
    for connection in (ours, theirs, other, silent):
        connection.close()
    assert (ready, places) == ([ours], [0])
    assert took_s < LONG_S / 2  # the original lingers for the timeout


@pytest.mark.covers("D-B1", "D-10")
def test_wait_ends_at_its_timeout(managers: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    other, silent = multiprocessing.Pipe()
    theirs.send("answer")
    context = multiprocessing.get_context("fork")
    rescuer = context.Process(target=_answer_later, args=(silent,))  # or the original would wait without limit
    rescuer.start()
    began = time.monotonic()
    managers.AsyncSubprocessEnvManager.wait([ours, other], 2, 0.2)
    took_s = time.monotonic() - began
    rescuer.join()
    for connection in (ours, theirs, other, silent):
        connection.close()
    assert took_s < LONG_S / 2


def _answer_later(connection: Any) -> None:
    time.sleep(LONG_S)
    connection.send("late")
