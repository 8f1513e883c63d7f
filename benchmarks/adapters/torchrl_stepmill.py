"""stepmill's StepmillEnv, driven as TorchRL's ParallelEnv is: options `backend`, `num_workers`."""

from __future__ import annotations

import torch

from benchmarks.adapters.base import Adapter
from stepmill.frontends.torchrl import StepmillEnv


class Engine(Adapter):
    """Results as a TensorDict; episodes restart within the step."""

    def start(self) -> None:
        torch.set_num_threads(1)
        self.envs = StepmillEnv(self.job.env_fns, categorical_action_encoding=True, **self.job.options)
        self._state = self.envs.reset()
        self._tensors = [torch.from_numpy(actions) for actions in self.actions]

    def advance(self) -> int:
        self.turn = (self.turn + 1) & 63
        self._state["action"] = self._tensors[self.turn]
        result, self._state = self.envs.step_and_maybe_reset(self._state)
        result["next", "observation"].view(-1)[0].item()
        result["next", "reward"][-1].item()
        return self.num_envs

    def close(self) -> None:
        self.envs.close()
