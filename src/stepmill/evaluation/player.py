"""Plays the episodes of a plan with the envs of a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import Batch, EnvFault, EnvState, Pool, StepmillError, UsageError
from stepmill.evaluation.episode_env import ORDER, EpisodeOrder, find_success
from stepmill.evaluation.plan import Plan
from stepmill.evaluation.policies import NO_EPISODE, Actor, Rows, take_rows
from stepmill.evaluation.result import Episode
from stepmill.evaluation.settings import EvaluateOptions

_MAX_REFUSALS = 100  # a command that is refused more often, without a fault, would be refused without end


class Player:
    """Gives the next episode to each env that is free, and the policy's actions to each env that is ready.

    Args:
        pool: envs with one row each, which do not reset by themselves.
        actor: the policy.
        plan: all episodes.
        todo: the ids of those that are to be played.
        settings: of the evaluation.
    """

    def __init__(self, pool: Pool, actor: Actor, plan: Plan, todo: Sequence[int], settings: EvaluateOptions) -> None:
        num_envs = pool.num_envs
        self._pool = pool
        self._actor = actor
        self._observations = pool.single_observation_space
        self._plan = plan
        self._todo = deque(todo)
        self._settings = settings
        self._attempts: dict[int, int] = {}
        self._waiting: list[int] = []  # envs whose episode begins with a reset that has not been sent yet
        self._num_refusals = 0  # how often a command was refused since the last fault
        # By env: the episode that it plays, and what is known of it.
        self._episode_of = np.full(num_envs, NO_EPISODE, np.int64)
        self._is_first = np.zeros(num_envs, np.bool_)
        self._return = np.zeros(num_envs, np.float64)
        self._length = np.zeros(num_envs, np.int64)
        self._began_s = np.zeros(num_envs, np.float64)

    def episodes(self) -> Iterator[Episode]:
        """Play all, and yield each when it has ended.

        Raises:
            UsageError: the policy's actions are invalid.
            LauncherDied: no worker can be started any more.
        """
        self._begin(range(self._pool.num_envs))
        while (self._episode_of != NO_EPISODE).any():
            self._send_resets()
            received = self._pool.receive(0 if self._waiting else 1)
            if received.batch is not None:
                yield from self._take_results(received.batch, received.faults)
            if received.faults:
                yield from self._take_faults(received.faults)

    def _begin(self, env_ids: Sequence[int] | range) -> None:
        """Begin the next episodes, as many as there are, with these envs."""
        begun = [env_id for env_id, _ in zip(env_ids, self._todo, strict=False)]
        if not begun:
            return
        for env_id in begun:
            episode_id = self._todo.popleft()
            self._episode_of[env_id] = episode_id
            self._attempts[episode_id] = self._attempts.get(episode_id, 0) + 1
        self._waiting += begun
        self._is_first[begun] = True
        self._return[begun] = 0.0
        self._length[begun] = 0
        self._began_s[begun] = perf_counter()
        self._send_resets()

    def _send_resets(self) -> None:
        """Reset the envs of episodes that begin. If a fault prevents it, do so after `receive` has returned the fault."""
        if not self._waiting:
            return
        seeds, options = {}, {}
        for env_id in self._waiting:
            episode_id = int(self._episode_of[env_id])
            seeds[env_id] = self._plan.seed_of(episode_id)
            options[env_id] = self._options(episode_id)
        try:
            self._pool.reset_async(env_ids=self._waiting, seed=seeds, options=options)
            self._waiting = []
        except StepmillError as error:
            self._note_refusal(error)

    def _note_refusal(self, error: StepmillError) -> None:
        """Go on after a command of which nothing was sent: `receive` returns the faults of the envs that are lost."""
        self._num_refusals += 1
        if isinstance(error, UsageError) or self._num_refusals > _MAX_REFUSALS:
            raise error

    def _options(self, episode_id: int) -> dict[str, Any]:
        """Return the options of the reset that begins an episode, with an order for `EpisodeEnv`."""
        task = self._plan.task_of(episode_id)
        if not self._plan.has_orders:
            return task.options
        video = self._settings.video_of(episode_id, self._plan.file_name_of(episode_id))
        return {**task.options, ORDER: EpisodeOrder(task.maker, video, self._settings.record == "failures")}

    def _take_results(self, batch: Batch, faults: Mapping[int, EnvFault]) -> list[Episode]:
        """Count the rows of a batch, begin episodes, and send actions."""
        ids = batch.env_id
        self._length[ids] += ~self._is_first[ids]
        self._return[ids] += batch.reward
        ended = batch.terminated | batch.truncated
        is_going = ~ended
        episodes: list[Episode] = []
        if ended.any():
            for row in np.flatnonzero(ended).tolist():
                episodes += self._end(int(ids[row]), row_info(batch.info, row))
            self._begin([env_id for env_id in ids[ended].tolist() if env_id not in faults])
        if faults:
            is_going &= np.array([env_id not in faults for env_id in ids.tolist()])
        if is_going.any():
            self._act(batch, np.flatnonzero(is_going))
        return episodes

    def _act(self, batch: Batch, index: NDArray[np.int64]) -> None:
        ids = batch.env_id[index]
        is_whole = len(index) == len(batch.env_id)
        obs = batch.obs if is_whole else take_rows(self._observations, batch.obs, index)
        actions = self._actor.act(Rows(obs, ids, self._episode_of[ids], self._is_first[ids]))
        self._is_first[ids] = False

        while len(ids):
            try:
                self._pool.send(actions, ids)
                return
            except StepmillError as error:
                self._note_refusal(error)
            states = self._pool.states
            living = np.flatnonzero([states[env_id] is not EnvState.FAULTED for env_id in ids.tolist()])
            actions, ids = take_rows(self._pool.single_action_space, actions, living), ids[living]

    def _end(self, env_id: int, info: dict[str, Any]) -> list[Episode]:
        """Return the episode that an env has played to its end; none if a fault has ended it, and it is played again."""
        fault = info.get("fault")
        if isinstance(fault, dict) and "not_replayable" in fault:  # of on_fault="replay", which has given up
            return self._fail(env_id, fault["message"])
        return [
            self._finish(
                env_id,
                episode_return=float(self._return[env_id]),
                length=int(self._length[env_id]),
                success=find_success(info, self._settings.success),
                infos={name: info[name] for name in self._settings.infos if name in info},
            )
        ]

    def _finish(self, env_id: int, **found: Any) -> Episode:
        episode_id = int(self._episode_of[env_id])
        self._episode_of[env_id] = NO_EPISODE
        task, seed = self._plan.key_of(episode_id)
        wall_s = perf_counter() - float(self._began_s[env_id])
        return Episode(task=task, seed=seed, wall_s=wall_s, attempts=self._attempts.pop(episode_id), **found)

    def _fail(self, env_id: int, message: str, *, is_counted: bool = True) -> list[Episode]:
        """Play the episode of an env again, or return it with its fault."""
        episode_id = int(self._episode_of[env_id])
        if not is_counted:
            self._attempts[episode_id] -= 1
        elif self._attempts[episode_id] > self._settings.retries:
            return [self._finish(env_id, episode_return=None, length=None, success=None, fault=message)]
        self._todo.appendleft(episode_id)
        self._episode_of[env_id] = NO_EPISODE
        return []

    def _take_faults(self, faults: Mapping[int, EnvFault]) -> list[Episode]:
        """Bring envs back after faults, and let them play. Of a deadline that was missed only the env that was late is guilty."""
        episodes: list[Episode] = []
        for env_id, fault in faults.items():
            if fault.error.is_final:
                raise fault.error
            if self._episode_of[env_id] != NO_EPISODE:
                guilty = getattr(fault.error, "env_id", None)
                episodes += self._fail(env_id, fault.error.message, is_counted=guilty in (None, env_id))
        self._num_refusals = 0
        self._waiting = [env_id for env_id in self._waiting if env_id not in faults]
        lost = list(faults)
        with suppress(StepmillError):  # of neighbours; a reset revives, too, but waits for the worker to start
            self._pool.revive(lost, wait=False)
        self._begin(lost)
        return episodes


def row_info(info: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the info of one row, as the env returned it, from merged infos."""
    found = {}
    for key, value in info.items():
        mask = info.get(f"_{key}")
        if mask is not None and mask[row]:
            found[key] = row_info(value, row) if isinstance(value, dict) else value[row]
    return found
