"""stepmill's FastParallelEnvironment: options `num_workers`, `as_tensors` and `num_spares`.

The no-op env always returns the same TimeStep. The env of job "reset1s" sleeps 20 ms in a step and 1 s in a reset, and its
episodes have 50 steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.adapters.base import Adapter
from stepmill.frontends.alf import FastParallelEnvironment


@dataclass(frozen=True)
class Spec:
    """Replaces ALF's TensorSpec."""

    shape: tuple[int, ...]
    dtype: str


class TimeStep(NamedTuple):
    """The fields of ALF's TimeStep."""

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
    """Always returns the same TimeStep; a step costs one method call."""

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


class SlowResetAlf(NoopAlf):
    """50 steps of 20 ms, then a reset of 1 s."""

    STEP_S, RESET_S, LENGTH = 0.02, 1.0, 50

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id)
        self._t = 13 * env_id  # the envs are out of phase, as in a long run

    def reset(self) -> Any:
        if self._t >= self.LENGTH:
            time.sleep(self.RESET_S)
            self._t = 0
        return self._time_step._replace(step_type=np.int32(0))

    def step(self, action: Any) -> Any:
        time.sleep(self.STEP_S)
        self._t += 1
        return self._time_step._replace(step_type=np.int32(2 if self._t >= self.LENGTH else 1))


class Engine(Adapter):
    """One call steps all envs; TimeSteps hold tensors, or arrays without torch."""

    def start(self) -> None:
        num_spares = self.job.options.get("num_spares", 0)
        kind = SlowResetAlf if self.job.env == "reset1s" else NoopAlf
        self.env = FastParallelEnvironment(
            [kind] * (self.num_envs + num_spares),
            num_spare_envs_for_reload=num_spares,
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
