"""Some envs of a `StepmillEnv` as a separate env, `env[2:]`; attributes and methods of all envs, `env.attr`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from stepmill.frontends.torchrl.engine import Engine, select_rows
from stepmill.pool.pool import Pool
from stepmill.pool.port import Seed
from stepmill.worker.calls import has_named

if TYPE_CHECKING:
    from stepmill.frontends.torchrl.env import StepmillEnv


class PoolEnv(EnvBase):
    """The base class of `StepmillEnv` and its views, which provides the state and the attributes of their envs."""

    _engine: Engine
    _env_ids: Sequence[int]

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """Return the state of the envs that lasts longer than an episode: {"worker0": {part: state}, ...}.

        Parts are the results of `state_dict()` of envs and wrappers that have that method, and running statistics as tensors,
        such as those of Gymnasium's `NormalizeObservation`; see `env_state.py`. With arguments, as torch calls it for a part of
        another module, the result is empty.

        Raises:
            EnvError: an env raised.
        """
        if args or kwargs:
            of_module: OrderedDict[str, Any] = super().state_dict(*args, **kwargs)
            return of_module
        return self._engine.states.read(self._engine.pool, self._env_ids)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        """Load the result of `state_dict`, between two steps. An empty dict changes nothing.

        The state is also loaded into envs that are rebuilt later: after a crash, after `update_kwargs`, or when the env is opened
        again. (TorchRL's rebuilt envs lose it.)

        Args:
            state_dict: as `state_dict` returns it; or the state of one env, without "worker0", for all envs.
            strict: True refuses unknown and missing envs and parts; False loads those that match.
        Raises:
            UsageError: with `strict`, envs or parts are unknown or missing. Nothing is loaded.
            EnvError: an env raised while it loaded its state. It would raise again when it is rebuilt. Load another state, or
                make a new env.
        """
        self._engine.states.load(self._engine.pool, self._env_ids, state_dict, strict=strict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "_engine" not in self.__dict__:
                raise
        pool = self._engine.pool
        if not has_attribute(pool, name):
            raise AttributeError(f"neither {type(self).__name__} nor its envs have an attribute {name!r}")
        return FanOut(pool, name, self._env_ids)


class EnvView(PoolEnv):
    """B envs of a `StepmillEnv` as an env of batch size [B]. Its envs are those of the `StepmillEnv`, which closes them."""

    def __init__(self, whole: StepmillEnv, ids: NDArray[np.int64]) -> None:
        super().__init__(device=whole.device, batch_size=torch.Size([len(ids)]))
        self._whole = (whole,)  # in a tuple, so that torch does not make it a submodule
        self._engine = whole._engine
        self._env_ids = self.env_ids = tuple(ids.tolist())
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
        obs = select_rows(self._engine.reset(mask, seeds, **kwargs), ids)
        flags = {key: flag[list(self.env_ids)] for key, flag in whole._flag_tensors().items()}
        return self._wrap({**whole._observation_tensors(obs, ids), **flags})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        whole = self._whole[0]
        with torch.no_grad():
            actions = whole._reader.read(tensordict)
        ids = np.array(self.env_ids)
        rows = self._engine.step_ids(actions, ids, whole._read_mask(tensordict, "_step"))
        return self._wrap(whole._step_tensors(rows, ids))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._engine.set_seed({env_id: seed + place for place, env_id in enumerate(self.env_ids)})

    @property
    def num_workers(self) -> int:
        """The number of these envs."""
        return len(self.env_ids)

    def _wrap(self, tensors: dict[str, Any]) -> TensorDictBase:
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env_ids={list(self.env_ids)}, device={self.device})"


class FanOut:
    """An attribute of all envs, or of some. It is read when it is iterated, indexed or compared, and called when it is called.

    `list(env.place)` reads an attribute of each env, `env.place[2]` that of one env, `env.jump(3)` calls a method of each env and
    returns a list, and `env.engine.temperature` is an attribute of an attribute.
    """

    def __init__(self, pool: Pool, path: str, env_ids: Sequence[int]) -> None:
        self._pool = pool
        self._path = path
        self._env_ids = tuple(env_ids)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method of each env; an attribute that is not callable is read."""
        return list(self._pool.call(self._path, *args, env_ids=self._env_ids, **kwargs))

    def values(self) -> list[Any]:
        """Return the attribute of each env."""
        return list(self._pool.get_attr(self._path, env_ids=self._env_ids))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __len__(self) -> int:
        return len(self._env_ids)

    def __getitem__(self, index: int | slice) -> Any:
        return self.values()[index]

    def __eq__(self, other: object) -> bool:
        return self.values() == (other.values() if isinstance(other, FanOut) else other)

    __hash__ = None  # type: ignore[assignment]  # equality depends on values that change

    def __getattr__(self, name: str) -> FanOut:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private; use a public attribute or method of the envs")
        return FanOut(self._pool, f"{self._path}.{name}", self._env_ids)

    def __repr__(self) -> str:
        return f"<{self._path} of envs {list(self._env_ids)}>"


def has_attribute(pool: Pool, name: str) -> bool:
    """Ask the worker of env 0 whether the env has an attribute."""
    return bool(pool.get_attr(partial(has_named, name), env_ids=[0])[0])  # a call would mark the env as modified
