"""stepmill's front-ends beside the real ALF and the real ML-Agents, which take turns: `python -m benchmarks.originals NAME`.

`make test-originals` makes the environments that have them, .venvs/alf and .venvs/trainers:

    PYTHONPATH=.venvs/alf/source .venvs/alf/bin/python -m benchmarks.originals alf
    .venvs/trainers/bin/python -m benchmarks.originals mlagents

ALF: an env that does nothing, 32 envs, stepmill with 2 workers, ALF with a process per env, which is its only way. ML-Agents: an
env with one agent, whose observation is an image of 84x84x3 float32, 4 envs, a process per env in both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

NUM_ALF_ENVS = 32
NUM_UNITY_ENVS = 4
BEHAVIOR = "ball"
IMAGE = (84, 84, 3)


def steps_per_second(step: Callable[[], int], seconds: float) -> float:
    """Call `step`, which returns a number of env steps, for so long."""
    num_steps, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        num_steps += step()
    return num_steps / elapsed


def compare(engines: dict[str, Callable[[], int]], rounds: int, seconds: float) -> None:
    """Print the median rate of each engine, and the median ratio of adjacent rounds."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for step in engines.values():
        steps_per_second(step, seconds / 4)  # warm-up
    for _ in range(rounds):
        for name, step in engines.items():
            rates[name].append(steps_per_second(step, seconds))
    ours, theirs = rates.values()
    ratio = statistics.median(mine / yours for mine, yours in zip(ours, theirs, strict=True))
    for name, values in rates.items():
        sys.stdout.write(f"{name:<12} {statistics.median(values):>12,.0f} env-steps/s\n")
    sys.stdout.write(f"ratio        {ratio:>12.1f}\n")


# ---- ALF ---------------------------------------------------------------------------------------------------------------


def make_alf_env(env_id: int) -> Any:
    """Return an ALF env that always returns the same TimeStep."""
    import alf.data_structures as ds
    import alf.tensor_specs as ts
    import torch
    from alf.environments.alf_environment import AlfEnvironment

    class NoopAlf(AlfEnvironment):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self._constant = ds.TimeStep(
                step_type=ds.StepType.MID,
                prev_action=np.float32(0),
                reward=np.float32(1),
                observation=np.zeros(4, np.float32),
                env_id=np.int32(env_id),
                discount=np.float32(1),
            )

        def action_spec(self) -> Any:
            return ts.BoundedTensorSpec((), torch.float32, minimum=-1.0, maximum=1.0)

        def observation_spec(self) -> Any:
            return ts.TensorSpec((4,), torch.float32)

        def env_info_spec(self) -> Any:
            return {}

        def seed(self, seed: int) -> None:
            pass

        def _step(self, action: Any) -> Any:
            return self._constant

        def _reset(self) -> Any:
            return self._constant

    return NoopAlf()


def run_alf(rounds: int, seconds: float) -> None:
    """Compare ALF's FastParallelEnvironment with ours."""
    import torch
    from alf.environments.fast_parallel_environment import FastParallelEnvironment as Original

    from stepmill.frontends.alf import FastParallelEnvironment

    torch.set_num_threads(1)
    constructors = [make_alf_env] * NUM_ALF_ENVS
    engines = {
        "stepmill": FastParallelEnvironment(constructors, start_serially=False, num_workers=2),
        "ALF": Original(constructors, start_serially=False),
    }
    action = torch.zeros(NUM_ALF_ENVS)
    for engine in engines.values():
        engine.reset()

    def step(engine: Any) -> int:
        float(engine.step(action).observation[0, 0])
        return NUM_ALF_ENVS

    compare({name: partial(step, engine) for name, engine in engines.items()}, rounds, seconds)
    for engine in engines.values():
        engine.close()


# ---- ML-Agents ---------------------------------------------------------------------------------------------------------


def make_unity_env(worker_id: int, side_channels: Any) -> Any:
    """Return an env of ML-Agents' API that always returns the same steps."""
    del worker_id, side_channels
    from mlagents_envs import base_env

    class NoopUnity(base_env.BaseEnv):  # type: ignore[misc, unused-ignore]
        academy_capabilities = None  # ML-Agents' worker asks for it

        def __init__(self) -> None:
            dimensions = (base_env.DimensionProperty.TRANSLATIONAL_EQUIVARIANCE,) * 2 + (
                base_env.DimensionProperty.NONE,
            )
            observation = base_env.ObservationSpec(IMAGE, dimensions, base_env.ObservationType.DEFAULT, "image")
            self._spec = base_env.BehaviorSpec([observation], base_env.ActionSpec.create_continuous(2))
            ones, ids = np.ones(1, np.float32), np.zeros(1, np.int32)
            decision = base_env.DecisionSteps([np.zeros((1, *IMAGE), np.float32)], ones, ids, None, ids, ones)
            self._steps = decision, base_env.TerminalSteps.empty(self._spec)

        @property
        def behavior_specs(self) -> Any:
            return base_env.BehaviorMapping({BEHAVIOR: self._spec})

        def step(self) -> None: ...

        def reset(self) -> None: ...

        def close(self) -> None: ...

        def set_actions(self, behavior_name: str, action: Any) -> None: ...

        def set_action_for_agent(self, behavior_name: str, agent_id: int, action: Any) -> None: ...

        def get_steps(self, behavior_name: str) -> Any:
            return self._steps

    return NoopUnity()


class NoopPolicy:
    """Returns the same action for each agent."""

    def get_action(self, steps: Any, worker_id: int) -> Any:
        from mlagents.trainers.action_info import ActionInfo
        from mlagents_envs.base_env import ActionTuple

        action = ActionTuple(np.zeros((1, 2), np.float32))
        return ActionInfo(action, action, {}, steps.agent_id)


def run_mlagents(rounds: int, seconds: float) -> None:
    """Compare ML-Agents' SubprocessEnvManager with ours."""
    from mlagents.trainers.settings import RunOptions
    from mlagents.trainers.subprocess_env_manager import SubprocessEnvManager as Original

    from stepmill.frontends.mlagents import SubprocessEnvManager

    engines = {
        "stepmill": SubprocessEnvManager(make_unity_env, RunOptions(), NUM_UNITY_ENVS),
        "ML-Agents": Original(make_unity_env, RunOptions(), NUM_UNITY_ENVS),
    }
    for engine in engines.values():
        engine.reset({})
        engine.set_policy(BEHAVIOR, NoopPolicy())
        engine.first_step_infos = []  # no agent managers take them

    def step(engine: Any) -> int:
        steps = engine.get_steps()
        for one in steps:
            one.current_all_step_result[BEHAVIOR][0].obs[0].item(0)
        return len(steps)

    compare({name: partial(step, engine) for name, engine in engines.items()}, rounds, seconds)
    for engine in engines.values():
        engine.close()


def main() -> None:
    """Print one comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=("alf", "mlagents"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    chosen = parser.parse_args()
    {"alf": run_alf, "mlagents": run_mlagents}[chosen.name](chosen.rounds, chosen.seconds)


if __name__ == "__main__":
    main()
