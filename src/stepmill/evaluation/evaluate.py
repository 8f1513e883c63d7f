"""`evaluate`: a queue of episodes over the envs of a pool. No env waits for the episode of another env."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepmill import Batch, EnvFault, OnFault, Pool, StepmillError, UsageError, WorkerDied
from stepmill.evaluation.episode_env import ORDER, EpisodeEnv, EpisodeOrder, find_success
from stepmill.evaluation.identity import identify
from stepmill.evaluation.journal import Journal
from stepmill.evaluation.plan import EnvFn, EvaluateOptions, Plan, Tasks, make_plan
from stepmill.evaluation.policies import NO_EPISODE, Act, make_act, select_rows
from stepmill.evaluation.result import Episode, Evaluation
from stepmill.observe.progress import show_progress
from stepmill.pool.port import PoolPort, checked_count, rows_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepmill.evaluation.plan import EvaluateKeywords

_MISUSE = f"{UsageError.__module__}.{UsageError.__qualname__}"  # the name of UsageError in EnvError.error_type


def evaluate(
    policy: Any,
    env: str | EnvFn | None = None,
    *,
    tasks: Tasks = None,
    seeds: Iterable[int] = range(100),
    num_envs: int = 16,
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Play each seed in each task exactly once, and return the results.

    The first env that is free plays the next episode, and the policy acts for the envs that are ready. If the policy computes each row
    independently, an episode is the same, to the bit, with any number of envs and workers and on every backend.

    Args:
        policy: one of the following:

            - `policy(obs) -> actions`: observations [B, ...], actions [B, ...]; B changes from call to call.
            - `policy(obs, episode_ids, is_first) -> actions`, for policies with memory: the number of each row's episode, by
              task and then by seed, [B] int64; whether the row is the observation of a reset, [B] bool.
            - a `torch.nn.Module`, called with tensors on its device. Its output is the actions; for discrete actions also
              logits [B, n], of which the largest is chosen.
            - a model of Stable-Baselines3 or sb3-contrib, recurrent or not, whose `predict` is called with deterministic=True.
        env: a Gymnasium id, or a function that makes an env.
        tasks: a mapping by name, or a sequence. Each task is a mapping of reset options for `env`, or its own env function
            with the same spaces.
        seeds: the seeds that `reset` gets, one after the other in each task.
        num_envs: how many episodes are played at the same time.
        **options: fields of EvaluateOptions, and of PoolOptions, such as `num_workers`, `step_timeout_s` and
            `on_fault="replay"`.

    Raises:
        UsageError: an argument is invalid, or the policy's actions are invalid.
        EnvError, WorkerDied: the envs could not be built.
    """
    began_s = perf_counter()
    own = EvaluateOptions.__dataclass_fields__.keys() & options.keys()
    settings = EvaluateOptions(**{name: options.pop(name) for name in own})  # type: ignore[misc]  # a name that varies
    plan = make_plan(env, tasks, seeds, must_render=settings.videos is not None)
    with closing(Journal(settings.resume, _identity(policy, plan, settings))) as journal:
        keys = [(pair.task, pair.seed) for pair in plan.pairs]
        todo = [episode_id for episode_id, key in enumerate(keys) if key not in journal.known]
        num_done = len(keys) - len(todo)
        with show_progress(f"{num_done}/{len(keys)} episodes", len(keys), is_quiet=not settings.progress) as show:
            show(num_done)  # the first number is no speed
            for count, episode in enumerate(_play(policy, plan, todo, num_envs, settings, options), num_done + 1):
                journal.add(episode)
                show(count, f"{count}/{len(keys)} episodes")
        return Evaluation(plan.env, tuple(map(journal.known.__getitem__, keys)), perf_counter() - began_s)


def _identity(policy: Any, plan: Plan, settings: EvaluateOptions) -> dict[str, object]:
    """Return the values that a resume file must share with this call."""
    if settings.resume is None:  # a policy has many weights, maybe on another device
        return {}
    env, tasks = plan.given
    return {
        "stepmill_evaluation": 1,
        "env": identify(env),
        "tasks": {name: identify(task) for name, task in tasks.items()},
        "policy": identify(policy),
        "success": identify(settings.success),
        "infos": [*settings.infos],
    }


def _play(
    policy: Any, plan: Plan, todo: Sequence[int], num_envs: int, settings: EvaluateOptions, options: Mapping[str, Any]
) -> Iterator[Episode]:
    if not todo:
        return
    make_env: EnvFn = partial(EpisodeEnv, plan.makers, settings.success) if plan.has_orders else plan.makers[0]
    for name in {"autoreset_mode", "num_episodes"} & options.keys():
        raise UsageError(f"evaluate() decides when an env is reset; leave {name} out")
    fixed = {"episode_stats": False, **options, "autoreset_mode": "Disabled"}
    with Pool([make_env] * min(checked_count(num_envs), len(todo)), **fixed) as pool:
        if pool.num_rows != pool.num_envs or pool.spec.agents or pool.spec.reward.shape:
            raise UsageError("evaluate() needs envs of one agent, with one row and one reward each; wrap the env")
        if OnFault.TRUNCATE in (pool.options.on_fault, pool.options.restarts.on_raise):
            raise UsageError("on_fault='truncate' would end episodes early; leave it out, or use 'replay'")
        yield from Player(pool, make_act(policy, pool, settings.num_rows), plan, todo, settings).episodes()


class Player:
    """Gives the next episode to each env that is free, and the policy's actions to each env that is ready.

    Args:
        pool: envs with one row each, which do not reset by themselves.
        act: the policy.
        plan: all episodes.
        todo: the ids of those that are to be played.
        settings: the options of the evaluation.
    """

    def __init__(self, pool: Pool, act: Act, plan: Plan, todo: Sequence[int], settings: EvaluateOptions) -> None:
        self._pool, self._act, self._plan, self._todo, self._settings = pool, act, plan, deque(todo), settings
        self._observation_space = pool.single_observation_space
        self._attempts: Counter[int] = Counter()
        self._can_cut = "fault" in PoolPort(pool).reserved_info_keys  # otherwise it is an info of the env
        # By env: the episode that it plays, and the results so far.
        self._episode_of, self._length = np.full((2, pool.num_envs), NO_EPISODE, np.int64)
        self._is_first = np.zeros(pool.num_envs, np.bool_)
        self._return, self._began_s = np.zeros((2, pool.num_envs), np.float64)

    def episodes(self) -> Iterator[Episode]:
        """Play all episodes, and yield each when it has ended.

        Raises:
            UsageError: the policy's actions are invalid.
            LauncherDied: no worker can be started any more.
        """
        while self._begin_episodes():
            received = self._pool.receive(1, self._settings.num_rows)
            batch, faults = received.batch, received.faults
            episodes: list[Episode] = []
            if batch is not None:
                self._length[batch.env_id] += ~self._is_first[batch.env_id]
                self._return[batch.env_id] += batch.reward
                has_ended = batch.terminated | batch.truncated
                episodes += self._end_rows(batch, np.flatnonzero(has_ended).tolist())
            episodes += self._end_faults(faults)
            if batch is not None:
                self._begin_episodes()  # so that these envs are reset while the policy computes actions
                must_step = ~has_ended if not faults else ~(has_ended | np.isin(batch.env_id, list(faults)))
                self._send_actions(batch, np.flatnonzero(must_step))
            yield from episodes

    def _begin_episodes(self) -> bool:
        """Begin the next episodes, as long as there are any, with the envs that play none. Return whether any env plays."""
        is_free = self._episode_of == NO_EPISODE
        env_ids = np.flatnonzero(is_free)[: len(self._todo)].tolist()
        if env_ids:
            for env_id in env_ids:
                self._episode_of[env_id] = episode_id = self._todo.popleft()
                self._attempts[episode_id] += 1
            self._is_first[env_ids] = True
            self._return[env_ids] = self._length[env_ids] = 0
            self._began_s[env_ids] = perf_counter()
            seeds = {env_id: self._plan.pairs[self._episode_of[env_id]].seed for env_id in env_ids}
            options = {env_id: self._options(int(self._episode_of[env_id])) for env_id in env_ids}
            self._pool.reset_async(env_ids=env_ids, seed=seeds, options=options)
        return bool(env_ids) or not is_free.all()

    def _options(self, episode_id: int) -> dict[str, Any] | None:
        """Return the options of the reset that begins an episode, with an order for `EpisodeEnv`."""
        pair = self._plan.pairs[episode_id]
        if not self._plan.has_orders:
            return pair.options or None
        video = self._settings.video_of(episode_id, pair.file_name)
        return {**pair.options, ORDER: EpisodeOrder(pair.maker, video, self._settings.record == "failures")}

    def _send_actions(self, batch: Batch, rows: NDArray[np.int64]) -> None:
        """Send the policy's actions for these rows. What is lost meanwhile is a fault of the next `receive`."""
        if not len(rows):
            return
        ids = batch.env_id[rows]
        obs = batch.obs if len(rows) == len(batch.env_id) else select_rows(self._observation_space, batch.obs, rows)
        actions = self._act(obs, self._episode_of[ids], self._is_first[ids], ids)
        self._is_first[ids] = False
        self._pool.send(actions, ids)

    # ---- the ends of episodes -----------------------------------------------------------------------------------------

    def _end_rows(self, batch: Batch, rows: Sequence[int]) -> Iterator[Episode]:
        """Yield the episodes that ended in these rows."""
        # The infos are not merged, because merging fails if those of two envs differ in shape.
        infos = dict(rows_of(batch.info, rows)) if rows else {}
        for row in rows:
            env_id, info = int(batch.env_id[row]), infos.get(row, {})
            cut = (
                info["fault"] if self._can_cut and "fault" in info else None
            )  # of a replay that was given up, or of a neighbour
            if cut is None:
                yield self._end(env_id, self._results_of(env_id, info))
            else:
                yield from self._fail(env_id, cut["message"], is_counted=cut["kind"] != "neighbour")

    def _end_faults(self, faults: Mapping[int, EnvFault]) -> Iterator[Episode]:
        """Revive envs after faults, and yield the episodes that are not played again."""
        for env_id, fault in faults.items():
            error = fault.error
            if error.is_final:
                raise error
            if getattr(error, "error_type", None) == _MISUSE:  # of find_success, so each episode would fail
                raise UsageError(error.message) from error
            if self._episode_of[env_id] != NO_EPISODE:
                # It counts only against the env that caused it, if that is known.
                name = "running_env_id" if isinstance(error, WorkerDied) else "env_id"
                yield from self._fail(env_id, error.message, is_counted=getattr(error, name, None) in (None, env_id))
        if not faults:
            return
        with suppress(StepmillError):  # neighbours may fail; a reset also revives, but waits for the worker to start
            self._pool.revive(list(faults), wait=False)

    def _fail(self, env_id: int, fault: str, *, is_counted: bool) -> Iterator[Episode]:
        """Let the episode of an env be played again, or yield it with its fault."""
        episode_id = int(self._episode_of[env_id])
        self._attempts[episode_id] -= not is_counted
        if is_counted and self._attempts[episode_id] > self._settings.retries:
            yield self._end(env_id, {"fault": fault})
        else:
            self._episode_of[env_id] = NO_EPISODE
            self._todo.appendleft(episode_id)

    def _results_of(self, env_id: int, info: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "episode_return": self._return[env_id].item(),
            "length": self._length[env_id].item(),
            "success": find_success(info, self._settings.success),
            "infos": {name: info[name] for name in self._settings.infos if name in info},
        }

    def _end(self, env_id: int, results: dict[str, Any]) -> Episode:
        episode_id = int(self._episode_of[env_id])
        self._episode_of[env_id] = NO_EPISODE
        pair, wall_s = self._plan.pairs[episode_id], perf_counter() - self._began_s[env_id].item()
        return Episode(pair.task, pair.seed, attempts=self._attempts[episode_id], wall_s=wall_s, **results)
