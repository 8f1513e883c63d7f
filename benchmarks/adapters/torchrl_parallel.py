"""TorchRL's ParallelEnv: option `start_method` (fork by default: TorchRL's default, spawn, only starts more slowly)."""

from __future__ import annotations

import torch
from torchrl.envs import GymWrapper, ParallelEnv

from benchmarks.adapters.base import Adapter
from benchmarks.envs import EnvFn


class _Wrapped:
    """Makes one TorchRL env; picklable."""

    def __init__(self, make: EnvFn) -> None:
        self._make = make

    def __call__(self) -> GymWrapper:
        return GymWrapper(self._make(), categorical_action_encoding=True)


class Engine(Adapter):
    """One process per env; results as a TensorDict in shared memory, episodes restart within the step."""

    def start(self) -> None:
        torch.set_num_threads(1)
        fns = [_Wrapped(make) for make in self.job.env_fns]
        start_method = self.job.options.get("start_method", "fork")
        self.envs = ParallelEnv(self.num_envs, fns, mp_start_method=start_method, serial_for_single=False)
        self._state = self.envs.reset()
        # TorchRL calls observations that look like images "pixels".
        self._key = ("next", "pixels" if "pixels" in self._state.keys() else "observation")  # noqa: SIM118 (a TensorDict)
        self._tensors = [torch.from_numpy(actions) for actions in self.actions]

    def advance(self) -> int:
        self.turn = (self.turn + 1) & 63
        self._state["action"] = self._tensors[self.turn]
        result, self._state = self.envs.step_and_maybe_reset(self._state)
        obs = result[self._key]
        if self.job.is_timed:
            self.record_times(obs.numpy())
        else:
            obs.view(-1)[0].item()
        result["next", "reward"][-1].item()
        return self.num_envs

    def close(self) -> None:
        self.envs.close()
