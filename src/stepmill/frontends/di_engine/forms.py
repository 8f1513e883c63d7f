"""From a batch of the pool back to what each env gave: timesteps with its own classes, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.envs.di_engine import timestep_class
from stepmill.envs.di_engine_managed import TIMESTEP_KEY, TimestepFormat
from stepmill.frontends.di_engine.errors import TornError
from stepmill.pool.infos import OMITTED, rows_of
from stepmill.spec.batch import Batch
from stepmill.spec.errors import BadOutput
from stepmill.spec.tree import DictNode, Node, Opaque, TupleNode

Timestep = Any  # a tuple (obs, reward, done, info) of the env's own class
MakeRewards = Callable[[NDArray[np.float64]], list[Any]]


class Reader:
    """Knows the form of each env's timesteps. An env tells it with the first, and again when it changes."""

    def __init__(self, observation: Node) -> None:
        self._observation = observation
        self._forms: dict[int, TimestepFormat] = {}
        self._common: TimestepFormat | None = None  # of all envs that have told theirs
        self._is_common = False

    def read_obs(self, batch: Batch) -> list[Any]:
        """Return the observation of each row."""
        return split_rows(self._observation, batch.obs, batch.num_rows)

    def read(self, batch: Batch) -> list[Timestep | TornError]:
        """Return the timestep of each row, or an error in place of one that came torn."""
        observations = self.read_obs(batch)
        if type(batch.info) is dict and self._is_common:
            return self._read_alike(batch, observations)
        return self._read_rows(batch, observations, range(batch.num_rows))

    def _read_rows(self, batch: Batch, observations: list[Any], rows: Iterable[int]) -> list[Timestep | TornError]:
        cargoes, finals = _sort(batch)
        timesteps: list[Any] = []
        for row in rows:
            env_id = int(batch.env_id[row])
            cargo = cargoes.get(row)
            if isinstance(cargo, Exception):
                timesteps.append(_torn(env_id, cargo))
                continue
            info, form, whole = cargo or ({}, None, None)
            if form is not None:
                self._learn(env_id, form)
            obs = observations[row]
            if row in finals:
                info = {**info, "final_obs": finals[row]} if isinstance(info, dict) else info
            if whole is not None:
                cls, is_apart, apart, reward, done, extra = whole
                timesteps.append((cls or timestep_class())(apart if is_apart else obs, reward, done, info, *extra))
                continue
            form = self._forms[env_id]
            reward = _reward_maker(form)(batch.reward[row : row + 1])[0]
            timesteps.append(_class_of(form)(obs, reward, form[1](batch.terminated[row]), info))
        return timesteps

    def read_mixed(self, batch: Batch, is_reset: list[bool]) -> list[Any]:
        """Return for each row the observation if it is of a reset, else the timestep."""
        parts: list[Any] = list(self.read_obs(batch))
        steps = [row for row, reset in enumerate(is_reset) if not reset]
        for row, timestep in zip(steps, self._read_rows(batch, parts, steps), strict=True):
            parts[row] = timestep
        return parts

    def _read_alike(self, batch: Batch, observations: list[Any]) -> list[Timestep]:
        """All rows are of one form and none has an info. Hot path."""
        form = self._common
        assert form is not None
        cls = _class_of(form)
        rewards = _reward_maker(form)(batch.reward)
        dones = batch.terminated.tolist() if form[1] is bool else list(batch.terminated)
        return [cls(obs, reward, done, {}) for obs, reward, done in zip(observations, rewards, dones, strict=True)]

    def _learn(self, env_id: int, form: TimestepFormat) -> None:
        self._forms[env_id] = form
        self._is_common = all(other == form for other in self._forms.values())
        self._common = form


def split_rows(node: Node, value: Any, num: int) -> list[Any]:
    """Return a batch [B, ...] of observations as B of them, in the env's own structure; arrays are views."""
    if isinstance(node, Opaque):
        return list(value)
    if isinstance(node, DictNode):
        columns = [split_rows(child, value[key], num) for key, child in node.items]
        keys = [key for key, _ in node.items]
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(node, TupleNode):
        columns = [split_rows(child, value[place], num) for place, child in enumerate(node.children)]
        return [node.factory(*row) if node.factory else row for row in zip(*columns, strict=True)]
    return list(value) if value.ndim > 1 else [value[row, ...] for row in range(num)]


def _sort(batch: Batch) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return what came beside the arrays, and last observations of episodes that were reset at once, both by row."""
    cargoes: dict[int, Any] = {}
    finals: dict[int, Any] = {}
    for row, info in rows_of(batch.info):
        if "final_info" in info:
            finals[row] = info["final_obs"]
            cargoes[row] = _cargo_of(info["final_info"] or {})
        elif row not in finals:
            cargoes[row] = _cargo_of(info)
    return cargoes, finals


def _cargo_of(info: Mapping[str, Any]) -> Any:
    """Return what the env sent along, or the error that kept it from being read."""
    return info[OMITTED][0] if TIMESTEP_KEY not in info and OMITTED in info else info.get(TIMESTEP_KEY)


def _torn(env_id: int, cause: Exception) -> TornError:
    error = TornError(
        f"the timestep of env {env_id} cannot be read: {cause}; its info must be loadable in the manager's process",
        env_id=env_id,
        leaf="info",
        phase="step",
    )
    error.__cause__ = cause
    return error


def is_torn(error: BaseException) -> bool:
    """Whether an error tells of a timestep that arrived and could not be read."""
    return isinstance(error, TornError) or (isinstance(error, BadOutput) and error.phase == "info")


def _class_of(form: TimestepFormat) -> type[Any]:
    cls: type[Any] = form[0] or timestep_class()
    return cls


def _reward_maker(form: TimestepFormat) -> MakeRewards:
    """Return the function that gives rewards their class, dtype and shape back."""
    _, _, reward_class, dtype, shape = form
    if dtype is None:
        return lambda rewards: [reward_class(reward) for reward in rewards.tolist()]
    if reward_class is np.ndarray:
        return lambda rewards: _rows_of_array(rewards.astype(dtype), shape)
    return lambda rewards: list(rewards.astype(dtype))


def _rows_of_array(rewards: NDArray[Any], shape: tuple[int, ...]) -> list[Any]:
    return list(rewards.reshape(-1, *shape)) if shape else [rewards[row, ...] for row in range(len(rewards))]
