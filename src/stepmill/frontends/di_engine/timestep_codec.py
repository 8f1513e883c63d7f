"""`TimestepDecoder`: rebuilds the timesteps of a batch, with the classes, dtypes and shapes that each env returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.envs.di_engine import timestep_class
from stepmill.envs.di_engine_managed import TIMESTEP_KEY, TimestepFormat
from stepmill.frontends.di_engine.errors import TornError
from stepmill.pool.port import OMITTED, rows_of
from stepmill.spec.batch import Batch
from stepmill.spec.errors import BadOutput
from stepmill.spec.tree import DictNode, Node, Opaque, TupleNode

Timestep = Any  # a tuple (obs, reward, done, info) of the env's own class
MakeRewards = Callable[[NDArray[np.float64]], list[Any]]


class TimestepDecoder:
    """Rebuilds timesteps. An env sends the format of its timesteps with the first one, and again when it changes."""

    def __init__(self, observation: Node) -> None:
        self._observation = observation
        self._formats: dict[int, TimestepFormat] = {}
        self._shared_format: TimestepFormat | None = None  # the newest format
        self._is_uniform = False

    def read_obs(self, batch: Batch) -> list[Any]:
        """Return the observation of each row."""
        return split_rows(self._observation, batch.obs, batch.num_rows)

    def read(self, batch: Batch) -> list[Timestep | TornError]:
        """Return the timestep of each row, or an error where it cannot be read."""
        observations = self.read_obs(batch)
        if type(batch.info) is dict and self._is_uniform:
            return self._read_uniform(batch, observations)
        return self._read_rows(batch, observations, range(batch.num_rows))

    def _read_rows(self, batch: Batch, observations: list[Any], rows: Iterable[int]) -> list[Timestep | TornError]:
        sent_infos, finals = _split_infos(batch)
        timesteps: list[Any] = []
        for row in rows:
            env_id = int(batch.env_id[row])
            sent = sent_infos.get(row)
            if isinstance(sent, Exception):
                timesteps.append(_torn_error(env_id, sent))
                continue
            info, step_format, whole = sent or ({}, None, None)
            if step_format is not None:
                self._store_format(env_id, step_format)
            obs = observations[row]
            if row in finals:
                info = {**info, "final_obs": finals[row]} if isinstance(info, dict) else info
            if whole is not None:
                cls, is_obs_sent, sent_obs, reward, done, extra = whole
                timesteps.append(
                    (cls or timestep_class())(sent_obs if is_obs_sent else obs, reward, done, info, *extra)
                )
                continue
            step_format = self._formats[env_id]
            reward = _reward_maker(step_format)(batch.reward[row : row + 1])[0]
            timesteps.append(_class_of(step_format)(obs, reward, step_format[1](batch.terminated[row]), info))
        return timesteps

    def read_mixed(self, batch: Batch, is_reset: list[bool]) -> list[Any]:
        """Return for each row the observation if it is of a reset, else the timestep."""
        parts: list[Any] = list(self.read_obs(batch))
        steps = [row for row, reset in enumerate(is_reset) if not reset]
        for row, timestep in zip(steps, self._read_rows(batch, parts, steps), strict=True):
            parts[row] = timestep
        return parts

    def _read_uniform(self, batch: Batch, observations: list[Any]) -> list[Timestep]:
        """Return the timesteps of rows that have one format and no info. Hot path."""
        step_format = self._shared_format
        assert step_format is not None
        cls = _class_of(step_format)
        rewards = _reward_maker(step_format)(batch.reward)
        dones = batch.terminated.tolist() if step_format[1] is bool else list(batch.terminated)
        return [cls(obs, reward, done, {}) for obs, reward, done in zip(observations, rewards, dones, strict=True)]

    def _store_format(self, env_id: int, step_format: TimestepFormat) -> None:
        self._formats[env_id] = step_format
        self._is_uniform = all(other == step_format for other in self._formats.values())
        self._shared_format = step_format


def split_rows(node: Node, value: Any, num: int) -> list[Any]:
    """Return a batch [B, ...] of observations as a list of B observations, in the env's structure; arrays are views."""
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


def _split_infos(batch: Batch) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the data that were sent besides the arrays, and the last observations of episodes reset in place.

    Both are dicts by row.
    """
    sent_infos: dict[int, Any] = {}
    finals: dict[int, Any] = {}
    for row, info in rows_of(batch.info):
        if "final_info" in info:
            finals[row] = info["final_obs"]
            sent_infos[row] = _sent_info(info["final_info"] or {})
        elif row not in finals:
            sent_infos[row] = _sent_info(info)
    return sent_infos, finals


def _sent_info(info: Mapping[str, Any]) -> Any:
    """Return what the env sent in its info, or the error that was raised when it was loaded."""
    return info[OMITTED][0] if TIMESTEP_KEY not in info and OMITTED in info else info.get(TIMESTEP_KEY)


def _torn_error(env_id: int, cause: Exception) -> TornError:
    error = TornError(
        f"the timestep of env {env_id} cannot be read: {cause}; its info must be loadable in the manager's process",
        env_id=env_id,
        leaf="info",
        phase="step",
    )
    error.__cause__ = cause
    return error


def is_torn(error: BaseException) -> bool:
    """Whether an error means that a timestep arrived and could not be read."""
    return isinstance(error, TornError) or (isinstance(error, BadOutput) and error.phase == "info")


def _class_of(step_format: TimestepFormat) -> type[Any]:
    cls: type[Any] = step_format[0] or timestep_class()
    return cls


def _reward_maker(step_format: TimestepFormat) -> MakeRewards:
    """Return the function that restores the class, dtype and shape of rewards."""
    _, _, reward_class, dtype, shape = step_format
    if dtype is None:
        return lambda rewards: [reward_class(reward) for reward in rewards.tolist()]
    if reward_class is np.ndarray:
        return lambda rewards: _rows_of_array(rewards.astype(dtype), shape)
    return lambda rewards: list(rewards.astype(dtype))


def _rows_of_array(rewards: NDArray[Any], shape: tuple[int, ...]) -> list[Any]:
    return list(rewards.reshape(-1, *shape)) if shape else [rewards[row, ...] for row in range(len(rewards))]
