"""stepmill's FastParallelEnvironment: options `num_workers` and `as_tensors`.

The env says the same TimeStep each time, as `benchmarks.envs.NoopEnv` says the same observation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.adapters.base import Adapter
from stepmill.frontends.alf import FastParallelEnvironment


@dataclass(frozen=True)
class Spec:
    """What a TensorSpec is."""

    shape: tuple[int, ...]
    dtype: str


class TimeStep(NamedTuple):
    """ALF's fields."""

    step_type: Any = ()
    reward: Any = ()
    discount: Any = ()
    observation: Any = ()
    prev_action: Any = ()
    env_id: Any = ()
    untransformed: Any = ()
    env_info: Any = ()


_OBSERVATION, _ACTION, _FLOAT, _INT = Spec((4,), "float32"), Spec((), "int64"), Spec((), "float32"), Spec((), "int32")


class NoopAlf:
    """Returns the same TimeStep for ever; a step costs one method call."""

    batched = False

    def __init__(self, env_id: int) -> None:
        self._time_step = TimeStep(
            np.int32(1), np.float32(1), np.float32(1), np.zeros(4, np.float32), np.int64(0), np.int32(env_id)
        )

    def observation_spec(self) -> Any:
        return _OBSERVATION

    def action_spec(self) -> Any:
        return _ACTION

    def env_info_spec(self) -> Any:
        return ()

    def time_step_spec(self) -> Any:
        return TimeStep(_INT, _FLOAT, _FLOAT, _OBSERVATION, _ACTION, _INT)

    def reset(self) -> Any:
        return self._time_step

    def step(self, action: Any) -> Any:
        return self._time_step


class Engine(Adapter):
    """One call steps all; TimeSteps of tensors, or of arrays where there is no torch."""

    def start(self) -> None:
        constructors = [functools.partial(NoopAlf) for _ in range(self.num_envs)]
        self.env = FastParallelEnvironment(
            constructors,
            num_workers=self.job.options.get("num_workers"),
            as_tensors=self.job.options.get("as_tensors"),
        )
        self.env.reset()

    def advance(self) -> int:
        time_step = self.env.step(self.next_actions())
        time_step.observation[0, 0].item()
        time_step.reward[-1].item()
        return self.num_envs

    def close(self) -> None:
        self.env.close()
