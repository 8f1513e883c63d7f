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

from stepmill import Batch, EnvFault, EnvState, OnFault, Pool, StepmillError, UsageError, WorkerDied
from stepmill.evaluation.episode_env import ORDER, EpisodeEnv, EpisodeOrder, find_success
from stepmill.evaluation.identity import identify
from stepmill.evaluation.journal import Journal
from stepmill.evaluation.plan import EnvFn, EvaluateOptions, Plan, Tasks, make_plan
from stepmill.evaluation.policies import NO_EPISODE, Act, make_act, take_rows
from stepmill.evaluation.result import Episode, Evaluation
from stepmill.observe.progress import BarColumn, TextColumn, TimeRemainingColumn, show_progress
from stepmill.pool.port import PoolPort, rows_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepmill.evaluation.plan import EvaluateKeywords

_MISUSE = f"{UsageError.__module__}.{UsageError.__qualname__}"  # the name of UsageError in EnvError.error_type
_MAX_REFUSALS = 100  # a command that is refused more often, without a fault, would be refused without end


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
        columns = (BarColumn(), TextColumn("{task.completed}/{task.total} episodes"), TimeRemainingColumn())
        with show_progress(*columns, is_quiet=not settings.progress) as bar:
            shown = bar.add_task("", total=len(keys), completed=len(keys) - len(todo))
            for episode in _play(policy, plan, todo, num_envs, settings, options):
                journal.add(episode)
                bar.advance(shown)
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
    with Pool([make_env] * min(num_envs, len(todo)), **fixed) as pool:
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
        self._spaces = pool.single_observation_space, pool.single_action_space
        self._attempts: Counter[int] = Counter()
        self._waiting: list[int] = []  # envs whose reset has not been sent yet
        self._num_refusals = 0  # how often a command was refused since the last fault
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
        self._begin(range(self._pool.num_envs))
        while (self._episode_of != NO_EPISODE).any():
            self._send_resets()
            received = self._pool.receive(0 if self._waiting else 1, self._settings.num_rows)
            if received.batch is not None:
                yield from self._take_results(received.batch, received.faults)
            if received.faults:
                yield from self._take_faults(received.faults)

    def _begin(self, env_ids: Iterable[int]) -> None:
        """Begin the next episodes, as long as there are any, with these envs."""
        for env_id in env_ids:
            if not self._todo:
                break
            episode_id = self._todo.popleft()
            self._attempts[episode_id] += 1
            self._waiting.append(env_id)
            self._episode_of[env_id] = episode_id
            self._is_first[env_id] = True
            self._return[env_id] = self._length[env_id] = 0
            self._began_s[env_id] = perf_counter()
        self._send_resets()

    def _send_resets(self) -> None:
        """Reset the envs of episodes that begin. If a fault prevents it, do so after `receive` has returned the fault."""
        if not self._waiting:
            return
        seeds = {env_id: self._plan.pairs[self._episode_of[env_id]].seed for env_id in self._waiting}
        options = {env_id: self._options(int(self._episode_of[env_id])) for env_id in self._waiting}
        try:
            self._pool.reset_async(env_ids=self._waiting, seed=seeds, options=options)
            self._waiting = []
        except StepmillError as error:
            self._note_refusal(error)

    def _note_refusal(self, error: StepmillError) -> None:
        """Count a refused command, of which nothing was sent. `receive` returns the faults of the lost envs."""
        self._num_refusals += 1
        if isinstance(error, UsageError) or self._num_refusals > _MAX_REFUSALS:
            raise error

    def _options(self, episode_id: int) -> dict[str, Any] | None:
        """Return the options of the reset that begins an episode, with an order for `EpisodeEnv`."""
        pair = self._plan.pairs[episode_id]
        if not self._plan.has_orders:
            return pair.options or None
        video = self._settings.video_of(episode_id, pair.file_name)
        return {**pair.options, ORDER: EpisodeOrder(pair.maker, video, self._settings.record == "failures")}

    def _take_results(self, batch: Batch, faults: Mapping[int, EnvFault]) -> Iterator[Episode]:
        """Count the rows of a batch, begin episodes, and send actions."""
        ids = batch.env_id
        self._length[ids] += ~self._is_first[ids]
        self._return[ids] += batch.reward
        is_going = ~(batch.terminated | batch.truncated)
        if not is_going.all():
            ended = np.flatnonzero(~is_going).tolist()
            # The infos are not merged, because merging fails if those of two envs differ in shape.
            infos = dict(rows_of(batch.info, ended))
            episodes = [episode for row in ended for episode in self._end(int(ids[row]), infos.get(row, {}))]
            self._begin(env_id for env_id in ids[ended].tolist() if env_id not in faults)
            yield from episodes
        if faults:
            is_going &= ~np.isin(ids, list(faults))
        if is_going.any():
            self._send_actions(batch, np.flatnonzero(is_going))

    def _send_actions(self, batch: Batch, index: NDArray[np.int64]) -> None:
        ids = batch.env_id[index]
        obs = batch.obs if len(index) == len(batch.env_id) else take_rows(self._spaces[0], batch.obs, index)
        actions = self._act(obs, self._episode_of[ids], self._is_first[ids], ids)
        self._is_first[ids] = False
        while len(ids):
            if self._num_refusals:  # a command has found a dead worker since the last fault was received
                states = self._pool.states
                living = np.flatnonzero([states[env_id] is not EnvState.FAULTED for env_id in ids.tolist()])
                actions, ids = take_rows(self._spaces[1], actions, living), ids[living]
            try:
                if len(ids):
                    self._pool.send(actions, ids)
                return
            except StepmillError as error:
                self._note_refusal(error)

    def _end(self, env_id: int, info: Mapping[str, Any], fault: str = "", *, is_counted: bool = True) -> list[Episode]:
        """Return the episode that an env has played, or none if a fault ended the episode and it is played again."""
        episode_id = int(self._episode_of[env_id])
        self._episode_of[env_id] = NO_EPISODE
        if (
            self._can_cut and "fault" in info
        ):  # a replay has been given up, or a reset of a neighbour has replaced the worker
            cut = info["fault"]
            fault, is_counted = cut["message"], cut["kind"] != "neighbour"
        self._attempts[episode_id] -= not is_counted
        pair, attempts = self._plan.pairs[episode_id], self._attempts[episode_id]
        if fault and (attempts <= self._settings.retries or not is_counted):
            self._todo.appendleft(episode_id)
            return []
        found: dict[str, Any] = {"attempts": attempts, "wall_s": perf_counter() - self._began_s[env_id].item()}
        if fault:
            return [Episode(pair.task, pair.seed, fault=fault, **found)]
        found["episode_return"], found["length"] = self._return[env_id].item(), self._length[env_id].item()
        found["success"] = find_success(info, self._settings.success)
        found["infos"] = {name: info[name] for name in self._settings.infos if name in info}
        return [Episode(pair.task, pair.seed, **found)]

    def _take_faults(self, faults: Mapping[int, EnvFault]) -> Iterator[Episode]:
        """Revive envs after faults, and let them play. A fault counts only against the env that caused it, if that is known."""
        episodes: list[Episode] = []
        for env_id, fault in faults.items():
            if fault.error.is_final:
                raise fault.error
            if getattr(fault.error, "error_type", None) == _MISUSE:  # of find_success, so each episode would fail
                raise UsageError(fault.error.message) from fault.error
            if self._episode_of[env_id] != NO_EPISODE:
                error = fault.error
                name = "running_env_id" if isinstance(error, WorkerDied) else "env_id"
                is_counted = getattr(error, name, None) in (None, env_id)
                episodes += self._end(env_id, {}, error.message, is_counted=is_counted)
        self._num_refusals = 0
        self._waiting = [env_id for env_id in self._waiting if env_id not in faults]
        with suppress(StepmillError):  # neighbours may fail; a reset also revives, but waits for the worker to start
            self._pool.revive(list(faults), wait=False)
        self._begin(faults)
        yield from episodes
