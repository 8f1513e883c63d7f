"""`PoolClient`: sends a manager's commands to its pool by env_id, and returns one reply per command. It has no policy.

`TimestepDecoder` rebuilds the timesteps of a batch, with the classes, dtypes and shapes that each env returned.

send_steps, send_reset ──► pool ──► receive ──► EnvReply(env_id, command, value)
                                                  STEP   the timestep, or an error
                                                  RESET  the first observation, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from stepmill.envs.di_engine import timestep_class
from stepmill.envs.di_engine_managed import TIMESTEP_KEY, ManagedEnvMaker, ManagedSettings, TimestepFormat
from stepmill.frontends.batch_rows import infos_and_finals
from stepmill.frontends.di_engine.errors import TornError
from stepmill.pool.pool import Pool
from stepmill.pool.port import OMITTED
from stepmill.spec.batch import Batch
from stepmill.spec.errors import BadOutput, StepmillError
from stepmill.spec.options import AutoresetMode, BackendName, PoolOptions
from stepmill.spec.options import EnvState as PoolEnvState
from stepmill.spec.tree import DictNode, Node, Opaque, TupleNode


class Command(Enum):
    """What an env was sent."""

    STEP = "step"
    RESET = "reset"


class EnvReply(NamedTuple):
    """The reply of one env to a command: a timestep or an observation, or a StepmillError."""

    env_id: int
    command: Command
    value: Any


class PoolClient:
    """Sends commands to the envs of a pool, at most one per env at a time.

    Attributes:
        pending: the command of each env that has not replied yet.
        spaces: observation, action and reward space of env 0.
        envs: the env objects by env_id, if they run in the caller's thread.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], object]],
        options: PoolOptions,
        managed: ManagedSettings,
        linger_s: float = 0.0,
    ) -> None:
        """Start the envs.

        Args:
            env_fns: the functions that make the envs.
            options: the options of the pool. Unless its autoreset mode is SAME_STEP, no env resets itself.
            managed: settings for each env.
            linger_s: how long the pool waits for more replies when enough have come.
        """
        self.envs: dict[int, object] = {}
        sink = self.envs if options.backend is BackendName.SERIAL else None
        makers = [ManagedEnvMaker(env_fn, env_id, managed, sink) for env_id, env_fn in enumerate(env_fns)]
        if options.autoreset_mode is not AutoresetMode.SAME_STEP:
            options = replace(options, autoreset_mode=AutoresetMode.DISABLED)
        self.pool = Pool(makers, options=replace(options, episode_stats=False))
        self._linger_s = linger_s
        self.spaces: tuple[Any, Any, Any] = cloudpickle.loads(self.pool.spec.spaces)
        self.pending: dict[int, Command] = {}
        self._has_own_process = options.backend is BackendName.PROCESS and self.pool.num_workers == self.pool.num_envs
        self._decoder = TimestepDecoder(self.pool.spec.observation)
        self._lost_envs: dict[int, StepmillError] = {}  # by env without a command: why it needs a reset

    def close(self) -> None:
        """End the envs. Idempotent."""
        self.pending.clear()
        self.pool.close()

    # ---- commands ----------------------------------------------------------------------------------------------------

    def send_steps(self, actions: Mapping[int, Any]) -> None:
        """Send each env its action. Envs whose worker has died get none: `receive` returns their faults."""
        wanted = {env_id: action for env_id, action in actions.items() if env_id not in self._lost_envs}
        if len(wanted) == self.pool.num_envs:  # without a list of ids, the pool uses its fastest path
            self.pool.send([wanted[env_id] for env_id in range(len(wanted))])
        elif wanted:
            self.pool.send(list(wanted.values()), list(wanted))
        self.pending.update(dict.fromkeys(actions, Command.STEP))

    def send_reset(self, env_id: int, request: dict[str, Any], *, is_renewal: bool = False) -> None:
        """Begin to reset an env; the result of an earlier command is dropped.

        Args:
            env_id: the env.
            request: the options of `ManagedEnv.reset`.
            is_renewal: replace the env by a new one first; its process too, unless other envs share that.
        """
        renews_process = is_renewal and self._has_own_process
        if is_renewal and not renews_process:
            request = {**request, "renew": True}
        self.pending.pop(env_id, None)
        self._lost_envs.pop(env_id, None)
        try:
            if renews_process or self.pool.states[env_id] is PoolEnvState.FAULTED:
                # Its worker starts while the other envs run.
                self.pool.revive([env_id], wait=False, restart_living=renews_process)
        except StepmillError as error:  # the env cannot be replaced, for example because its thread hangs
            self._lost_envs[env_id] = error
        else:
            self.pool.reset_async(env_ids=[env_id], options=request)
        self.pending[env_id] = Command.RESET

    # ---- replies -----------------------------------------------------------------------------------------------------

    def receive(self, least: int, timeout_s: float | None) -> list[EnvReply]:
        """Wait for replies, and return all that have arrived.

        Args:
            least: how many replies to wait for.
            timeout_s: seconds, after which the result is empty; 0 does not wait; None waits without limit.
        """
        lost = [(env_id, self._lost_envs[env_id]) for env_id in self.pending if env_id in self._lost_envs]
        if lost:
            return [EnvReply(env_id, self.pending.pop(env_id), error) for env_id, error in lost]
        try:
            received = self.pool.receive(0 if timeout_s == 0 else least, None, timeout_s, self._linger_s)
        except StepmillError:
            raise
        except BaseException:
            self._drop_interrupted()
            raise
        replies = [] if received.batch is None else self._read_replies(received.batch)
        for env_id, fault in received.faults.items():
            command = self.pending.pop(env_id, None)
            if command is None:
                self._lost_envs[env_id] = fault.error
            else:
                replies.append(EnvReply(env_id, command, fault.error))
        return replies

    def _read_replies(self, batch: Batch) -> list[EnvReply]:
        env_ids = batch.env_id.tolist()
        commands = [self.pending.pop(env_id, Command.STEP) for env_id in env_ids]
        values = self._decoder.read(batch, [row for row, each in enumerate(commands) if each is Command.STEP])
        return list(map(EnvReply, env_ids, commands, values))

    def _drop_interrupted(self) -> None:
        """After Ctrl-C, drop the pending commands of envs that run in the caller's thread: these envs have a fault now."""
        for env_id, state in enumerate(self.pool.states):
            if state in (PoolEnvState.FAULTED, PoolEnvState.IDLE, PoolEnvState.NEEDS_RESET):
                self.pending.pop(env_id, None)


Timestep = Any  # a tuple (obs, reward, done, info) of the env's own class
MakeRewards = Callable[[NDArray[np.float64]], list[Any]]


class TimestepDecoder:
    """Rebuilds timesteps. An env sends the format of its timesteps with the first one, and again when it changes."""

    def __init__(self, observation: Node) -> None:
        self._observation = observation
        self._formats: dict[int, TimestepFormat] = {}
        self._shared_format: TimestepFormat | None = None  # the format of all envs, if they have one

    def read(self, batch: Batch, steps: Sequence[int]) -> list[Any]:
        """Return the timestep of each row in `steps`, or a TornError where it cannot be read, and the observations of the others."""
        values = split_rows(self._observation, batch.obs, batch.num_rows)
        if type(batch.info) is dict and self._shared_format is not None and len(steps) == len(values):
            return self._read_uniform(batch, values, self._shared_format)
        for row, timestep in zip(steps, self._read_rows(batch, values, steps), strict=True):
            values[row] = timestep
        return values

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

    def _read_uniform(self, batch: Batch, observations: list[Any], step_format: TimestepFormat) -> list[Timestep]:
        """Return the timesteps of rows that have one format and no info. Hot path."""
        cls = _class_of(step_format)
        rewards = _reward_maker(step_format)(batch.reward)
        dones = batch.terminated.tolist() if step_format[1] is bool else list(batch.terminated)
        return [cls(obs, reward, done, {}) for obs, reward, done in zip(observations, rewards, dones, strict=True)]

    def _store_format(self, env_id: int, step_format: TimestepFormat) -> None:
        self._formats[env_id] = step_format
        is_shared = all(other == step_format for other in self._formats.values())
        self._shared_format = step_format if is_shared else None


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
    newest, finals = infos_and_finals(batch.info)
    infos = newest | {row: final_info for row, (_, final_info) in finals.items()}
    return {row: _sent_info(info) for row, info in infos.items()}, {row: obs for row, (obs, _) in finals.items()}


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
