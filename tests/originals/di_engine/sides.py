"""Programs that run with DI-engine's classes or with ours: whose classes, managers that are closed, waits that are given up."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from tests.harness.interrupts import interrupted_after
from tests.originals import either
from tests.originals.rows import OURS

MARKS = [
    pytest.mark.filterwarnings("ignore"),  # those of DI-engine, and of what it imports
    pytest.mark.covers("D-37"),
    pytest.mark.skipif(
        importlib.util.find_spec("ding") is None, reason="DI-engine is not installed; make test-originals has it"
    ),
]
SUBPROCESS = "SyncSubprocessEnvManager"
ASYNC = "AsyncSubprocessEnvManager"
NEVER_S = 2.0


def class_of(whose: str, name: str) -> Any:
    """Return the class of that name of ours or of DI-engine."""
    return getattr(di_engine if whose == OURS else importlib.import_module("ding.envs.env_manager"), name)


class Maker(either.Maker):
    """Makes managers of one side, `make(name, env_fns, **settings)`, and closes them."""

    def __call__(self, name: str, env_fns: Any, **own: Any) -> Any:
        cls = class_of(self.whose, name)
        cfg = cls.default_config()
        cfg.update(own)
        return self.keep(cls(env_fns, cfg))

    def launched(self, name: str, env_fns: Any, **own: Any) -> Any:
        """Make a manager, and launch it."""
        manager = self(name, env_fns, **own)
        manager.launch()
        return manager

    def close(self) -> None:
        """Close the managers."""
        close_all(self.made, self.whose)


def close_all(made: list[Any], whose: str) -> None:
    """Close managers. DI-engine's leave their processes to themselves (D-B2), and cannot be closed if a process is gone.

    If an env of theirs is being reset, `close` reads the pipe that the thread of the reset reads, and each may get half of a message.
    """
    for manager in made:
        with contextlib.nullcontext() if whose == OURS else contextlib.suppress(Exception):
            manager.close()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


class Never(Exception):
    """A call did not return within NEVER_S."""


def interrupted() -> contextlib.AbstractContextManager[None]:
    """Raise Never after NEVER_S in the main thread."""

    def stop(*args: object) -> None:
        raise Never

    return interrupted_after(NEVER_S, stop)


def until(is_true: Callable[[], bool]) -> None:
    """Wait until `is_true()`; the test's time limit ends a wait that does not end."""
    while not is_true():
        threading.Event().wait(0.01)


class Screen:
    """What DI-engine's managers ask for frames: the attribute `_env` of an env."""

    def render(self, mode: str) -> Any:
        return np.full((2, 2, 3), len(mode), np.uint8)
