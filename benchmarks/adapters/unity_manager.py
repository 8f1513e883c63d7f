"""stepmill's SubprocessEnvManager: a process per env."""

from __future__ import annotations

from typing import Any

from benchmarks.adapters.base import Adapter
from benchmarks.unity import BEHAVIOR, NoopPolicy
from stepmill.frontends.mlagents import ManagerOptions, SubprocessEnvManager


class Engine(Adapter):
    """Returns as soon as one worker has answered, with all answers received so far."""

    def start(self) -> None:
        make = self.job.env_fns
        self.manager = SubprocessEnvManager(
            lambda worker_id, channels: make[worker_id](), None, self.num_envs, options=ManagerOptions(context="fork")
        )
        self.manager.set_policy(BEHAVIOR, NoopPolicy())
        self.manager.set_agent_manager(BEHAVIOR, _Nobody())
        self.manager.reset()

    def advance(self) -> int:
        steps = self.manager.get_steps()
        agents: Any = steps[0].current_all_step_result[BEHAVIOR]
        agents[0].obs[0].item(0)
        return len(steps)

    def close(self) -> None:
        self.manager.close()


class _Nobody:
    """An agent manager that does nothing."""

    policy: Any = None

    class policy_queue:  # noqa: N801 - the attribute's name
        class Empty(Exception):
            pass

        @classmethod
        def get_nowait(cls) -> Any:
            raise cls.Empty

    def add_experiences(self, *experience: Any) -> None:
        pass

    def end_episode(self) -> None:
        pass
