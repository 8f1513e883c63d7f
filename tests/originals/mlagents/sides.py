"""Programs that run with ML-Agents' managers or with ours: whose classes, an env, and what trainers give to managers."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import mlagents as front_end
from stepmill.frontends.mlagents import DecisionSteps, StatsSideChannel
from tests.frontends.mlagents.parts import WALK, AgentManager, Policy
from tests.harness.unity_envs import ScriptedBehaviors
from tests.originals import either
from tests.originals.rows import OURS

MARKS = [
    pytest.mark.filterwarnings("ignore"),  # those of ML-Agents and its dependencies
    pytest.mark.skipif(
        importlib.util.find_spec("mlagents") is None, reason="mlagents is not installed; make test-originals has it"
    ),
]
MANAGER = "SubprocessEnvManager"
_HOMES = {MANAGER: "subprocess_env_manager", "SimpleEnvManager": "simple_env_manager", "EnvManager": "env_manager"}


class Env(ScriptedBehaviors):
    """A scripted env that ML-Agents' worker takes, too. An agent's reward is the size of the last message of the channels."""

    academy_capabilities = None

    def get_steps(self, name: str) -> Any:
        decision, terminal = super().get_steps(name)
        size = np.full(len(decision), len(self.sent[-1]) if self.sent else 0, np.float32)
        return DecisionSteps(decision.obs, size, decision.agent_id), terminal


def class_of(whose: str, name: str = MANAGER) -> Any:
    """Return the class of that name of ours or of ML-Agents."""
    home = _HOMES.get(name, "env_manager" if name == "EnvironmentStep" else "subprocess_env_manager")
    return getattr(front_end if whose == OURS else importlib.import_module(f"mlagents.trainers.{home}"), name)


def run_options() -> Any:
    """Return ML-Agents' RunOptions."""
    return importlib.import_module("mlagents.trainers.settings").RunOptions()


def constant(value: float) -> Any:
    """Return ML-Agents' sampler of a constant."""
    return importlib.import_module("mlagents.trainers.settings").ConstantSettings(seed=0, value=value)


class Maker(either.Maker):
    """Makes managers of one side, and closes them. Keywords are options of ours."""

    def __call__(self, factory: Any, num: int = 1, cls: Any = None, options: Any = None, **own: Any) -> Any:
        keywords = {"context": "fork", **own} if self.is_ours else {}
        return self.keep((cls or class_of(self.whose))(factory, options or run_options(), num, **keywords))

    def reset(self, factory: Any, num: int = 1, **own: Any) -> Any:
        """Make a manager, and reset its envs."""
        manager = self(factory, num, **own)
        manager.reset({})
        return manager


def started(make: Maker, factory: Any, num: int = 1, names: Any = ("walk",), **own: Any) -> tuple[Any, dict[str, Any]]:
    """Return a manager after its first reset, and the agent managers of these behaviours, which have a policy each."""
    manager = make.reset(factory, num, **own)
    agents = {name: AgentManager() for name in names}
    queue = importlib.import_module("mlagents.trainers.agent_processor").AgentManagerQueue
    for name in names:
        agents[name].policy_queue = queue(name)
        manager.set_agent_manager(name, agents[name])
        manager.set_policy(name, Policy())
    return manager, agents


def scripted(hooks: Callable[[int], Any] = lambda worker_id: {}, script: Any = None) -> Any:
    """Return a factory of scripted envs, whose hooks depend on the worker."""

    def factory(worker_id: int, side_channels: Any) -> Any:
        return Env(script or WALK, side_channels=side_channels, hooks=hooks(worker_id))

    return factory


def speed_message() -> bytes:
    """Return the message of an env that reports a speed of 1.5, of which the most recent counts."""
    text = struct.pack("<i", 5) + b"speed" + struct.pack("<fi", 1.5, 1)
    return StatsSideChannel().channel_id.bytes_le + struct.pack("<i", len(text)) + text


def only_first(hooks: Any) -> Callable[[int], Any]:
    """Give hooks to worker 0 only."""
    return lambda worker_id: hooks if worker_id == 0 else {}


def step_until(manager: Any, worker_ids: set[int]) -> list[Any]:
    """Step until each of these workers has had a result; return all."""
    steps: list[Any] = []
    while not worker_ids <= {step.worker_id for step in steps}:
        found = manager.get_steps()
        manager.process_steps(found)
        steps += found
    return steps
