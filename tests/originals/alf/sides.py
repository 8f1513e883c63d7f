"""Programs that run with ALF's classes or with ours: whose classes, and an env that does what its action says"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import alf as front_end
from tests.originals import either
from tests.originals.rows import OURS

MARKS = [
    pytest.mark.filterwarnings("ignore"),  # those of ALF and its dependencies
    pytest.mark.skipif(
        importlib.util.find_spec("alf") is None, reason="ALF cannot be imported; make test-originals has it"
    ),
]
RAISE, DIE, HANG = -1.0, -2.0, -3.0  # actions
BIG = 4 << 20


def class_of(whose: str, name: str = "FastParallelEnvironment") -> Any:
    """Return the class of that name of ours or of ALF."""
    homes = {"FastParallelEnvironment": "fast_parallel_environment", "ProcessEnvironment": "process_environment"}
    module = f"alf.environments.{homes.get(name, 'alf_wrappers')}"
    return getattr(front_end if whose == OURS else importlib.import_module(module), name)


class Maker(either.Maker):
    """Makes parallel environments of one side, `make(constructors, **own)`, and closes them."""

    def __call__(self, constructors: Any, cls: Any = None, **own: Any) -> Any:
        return self.keep((cls or class_of(self.whose))(constructors, **own))


def _alf() -> Any:
    return importlib.import_module("alf")


def _data() -> Any:
    return importlib.import_module("alf.data_structures")


class Counting:
    """The methods of the env. It observes the env_id that it was made with, the number of its episode and step, and its action."""

    metadata = {"about": "counter"}

    def __init__(self, env_id: int | None = None, length: int = 3, size: int = 4, closes: bool = True) -> None:
        super().__init__()
        self.made_with, self.length, self.size, self.closes = env_id or 0, length, size, closes
        self.episode = self.t = 0
        self.is_over = True
        self.generator = np.random.RandomState(42)

    def action_spec(self) -> Any:
        return _alf().BoundedTensorSpec((), minimum=-9.0, maximum=9.0)

    def observation_spec(self) -> Any:
        return {"count": _alf().TensorSpec((self.size,)), "pair": (_alf().TensorSpec((), "int64"),)}

    def env_info_spec(self) -> Any:
        return {"t": _alf().TensorSpec(())}

    def _reset(self) -> Any:
        self.episode, self.t, self.is_over = self.episode + 1, 0, False
        return self._tell(_data().StepType.FIRST, np.float32(0))

    def _step(self, action: Any) -> Any:
        if self.is_over:
            return self.reset()
        act_out(float(action))
        self.t += 1
        self.is_over = self.t == self.length
        return self._tell(_data().StepType.LAST if self.is_over else _data().StepType.MID, action)

    def _tell(self, step_type: Any, action: Any) -> Any:
        count = np.zeros(self.size, np.float32)
        count[:4] = self.made_with, self.episode, self.t, action
        return _data().TimeStep(
            step_type=np.int32(step_type),
            reward=np.float32(self.t),
            discount=np.float32(not self.is_over),
            observation={"count": count, "pair": (np.int64(self.t),)},
            prev_action=np.float32(action),
            env_id=np.int32(self.made_with),
            env_info={"t": np.float32(self.t)},
        )

    def seed(self, seed: int) -> int:
        self.generator.seed(seed)
        return seed * 10

    def draw(self) -> float:
        return float(self.generator.uniform())

    def render(self, mode: str = "human") -> Any:
        return np.full((2, 2, 3), len(mode), np.uint8)

    def act_out(self, action: float) -> None:
        act_out(action)

    def echo(self, *args: Any, **keywords: Any) -> Any:
        return args, keywords

    def make_big(self, data: bytes) -> bytes:
        return data * 2

    def meet(self, folder: str, count: int) -> int:
        """Wait a second until `count` envs are in this method; return how many there are."""
        Path(folder, str(os.getpid())).touch()
        deadline = time.monotonic() + 1
        while (found := len(os.listdir(folder))) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def threads(self) -> Any:
        return importlib.import_module("torch").get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def progress(self) -> float:
        return float(importlib.import_module("alf.utils.schedulers").get_progress("global_counter"))

    def close(self) -> None:
        while not self.closes:
            time.sleep(1)


@functools.cache
def env_class() -> Any:
    """Return the class of the env: an AlfEnvironment, which only exists where ALF is installed."""
    base = importlib.import_module("alf.environments.alf_environment").AlfEnvironment
    return type("Counter", (Counting, base), {"__module__": __name__})


def act_out(action: float) -> None:
    """Raise, die or hang if the action says so."""
    if action == RAISE:
        raise ValueError("fails on purpose")
    if action == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    while action == HANG:
        time.sleep(1)


def counters(num: int, **own: Any) -> list[Any]:
    """Return constructors of envs."""
    return [functools.partial(make_counter, **own)] * num


def make_counter(env_id: int | None = None, **own: Any) -> Any:
    """Return an env; a spawned process finds this function by its name."""
    return env_class()(env_id, **own)


def actions(*values: float) -> Any:
    """Return the actions of all envs."""
    return importlib.import_module("torch").tensor(values).float()


def plain(value: Any) -> Any:
    """Return a nest as values with the class, the dtype and the shape of each part."""
    if hasattr(value, "_fields"):
        return type(value).__name__, {name: plain(each) for name, each in zip(value._fields, value, strict=True)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(each) for each in value]
    if hasattr(value, "dtype"):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.tolist()
    return value if isinstance(value, (int, float, str, type(None))) else str(value)
