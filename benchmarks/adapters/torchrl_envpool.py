"""MultiThreadedEnv over EnvPool: TorchRL's (option `is_own`) and stepmill's.

TorchRL's asks for `gym`, which no environment of today has, and of which it needs nothing that Gymnasium does not have.
After an episode's end its next step only resets, and the policy chooses that step's action from the last observation of the old
episode: those steps are taken off. stepmill's resets between two steps. With the option `resets`, TorchRL's does so, too, by the
method of its base class: then both give the same data.
"""

from __future__ import annotations

import sys

import gymnasium
import torch

from benchmarks.adapters.base import Adapter
from benchmarks.adapters.envpool_cpp import IDS


class Engine(Adapter):
    """Results as a TensorDict; two EnvPool threads."""

    def start(self) -> None:
        torch.set_num_threads(1)
        self._is_own: bool = self.job.options["is_own"]
        self._resets: bool = self.job.options.get("resets", not self._is_own)
        kwargs = {"num_threads": 2, "seed": 0}
        if self._is_own:
            sys.modules.setdefault("gym", gymnasium)
            from torchrl.envs import EnvBase, MultiThreadedEnv

            class WithResets(MultiThreadedEnv):
                step_and_maybe_reset = EnvBase.step_and_maybe_reset

            made = WithResets if self._resets else MultiThreadedEnv
            self.envs = made(self.num_envs, IDS[self.job.env], create_env_kwargs=kwargs)
        else:
            from stepmill.frontends import torchrl as ours

            self.envs = ours.MultiThreadedEnv(
                self.num_envs, IDS[self.job.env], create_env_kwargs=kwargs, categorical_action_encoding=True
            )
        self._state = self.envs.reset()
        self._tensors = [torch.from_numpy(actions) for actions in self.actions]

    def advance(self) -> int:
        self.turn = (self.turn + 1) & 63
        self._state["action"] = self._tensors[self.turn]
        result, self._state = self.envs.step_and_maybe_reset(self._state)
        result["next", "observation"].view(-1)[0].item()
        result["next", "reward"][-1].item()
        if not self._resets:
            self.ended = (result["next", "terminated"].numpy(), result["next", "truncated"].numpy())
        return self.num_envs

    def close(self) -> None:
        self.envs.close()
