"""`env[2:]`: some envs of a pool as a TorchRL env."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from stepmill.frontends.torchrl.engine import take_rows
from stepmill.frontends.torchrl.fanout import FanOut, has_attribute
from stepmill.pool.resets import Seed

if TYPE_CHECKING:
    from stepmill.frontends.torchrl.env import StepmillEnv


class EnvView(EnvBase):
    """Envs of a `StepmillEnv`, of batch size [B]. It holds no data: its envs are those of the whole, which closes them."""

    def __init__(self, whole: StepmillEnv, ids: NDArray[np.int64]) -> None:
        super().__init__(device=whole.device, batch_size=torch.Size([len(ids)]))
        self._whole = (whole,)  # not a module of ours
        self.env_ids = tuple(int(env_id) for env_id in ids)
        index = list(self.env_ids)
        self.action_spec = whole.full_action_spec[index]
        self.observation_spec = whole.observation_spec[index]
        self.reward_spec = whole.full_reward_spec[index]
        self.done_spec = whole.full_done_spec[index]
        self.is_closed = False

    def _reset(self, tensordict: TensorDictBase | None = None, *, seed: Seed = None, **kwargs: Any) -> TensorDictBase:
        whole, ids = self._whole[0], np.array(self.env_ids)
        mask = np.zeros(whole.num_workers, np.bool_)
        rows = None if tensordict is None else tensordict.get("_reset", None)
        mask[ids if rows is None else ids[rows.reshape(len(ids)).cpu().numpy()]] = True
        seeds = seed if seed is None or isinstance(seed, (int, Mapping)) else dict(zip(self.env_ids, seed, strict=True))
        obs = take_rows(whole._engine.reset(mask, seeds, **kwargs), ids)
        flags = {key: flag[list(self.env_ids)] for key, flag in whole._flags().items()}
        return self._wrap({**whole._observed(obs, ids), **flags})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        whole = self._whole[0]
        with torch.no_grad():
            actions = whole._reader.read(tensordict)
        ids = np.array(self.env_ids)
        return self._wrap(whole._pack(whole._engine.step_ids(actions, ids), ids))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._whole[0]._engine.set_seed({env_id: seed + place for place, env_id in enumerate(self.env_ids)})

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """Return what these envs keep beyond an episode, "worker0" for the first; see `StepmillEnv.state_dict`."""
        if args or kwargs:
            of_module: OrderedDict[str, Any] = super().state_dict(*args, **kwargs)
            return of_module
        engine = self._whole[0]._engine
        return engine.states.read(engine.pool, self.env_ids)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        """Give these envs back what `state_dict` returned; see `StepmillEnv.load_state_dict`."""
        engine = self._whole[0]._engine
        engine.states.load(engine.pool, self.env_ids, state_dict, strict=strict)

    def _wrap(self, tensors: dict[str, Any]) -> TensorDictBase:
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "_whole" not in self.__dict__:
                raise
        pool = self._whole[0].pool
        if not has_attribute(pool, name):
            raise AttributeError(f"neither {type(self).__name__} nor its envs have an attribute {name!r}")
        return FanOut(pool, name, self.env_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env_ids={list(self.env_ids)}, device={self.device})"
