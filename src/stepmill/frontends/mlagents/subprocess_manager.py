"""The manager of many Unity envs, each in a process of its own, that answers as soon as one of them has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepmill.frontends.mlagents.actions import plain_actions
from stepmill.frontends.mlagents.failures import UnityStuckError
from stepmill.frontends.mlagents.manager import EnvManager, logger
from stepmill.frontends.mlagents.players import end_players
from stepmill.frontends.mlagents.settings import (
    ManagerKeywords,
    ManagerOptions,
    OnCrash,
    checked_parameters,
    merge_manager_options,
    read_settings,
)
from stepmill.frontends.mlagents.specs import unpack_spec
from stepmill.frontends.mlagents.steps import EnvironmentStep, unpack
from stepmill.frontends.mlagents.supervisor import Supervisor
from stepmill.frontends.mlagents.timing import publish_timers, timer_tree
from stepmill.frontends.mlagents.worker import WorkerMaker
from stepmill.frontends.mlagents.workers import UnityEnvWorker, WorkerState
from stepmill.pool.pool import Pool
from stepmill.spec.errors import RecvTimeout, StepmillError, UsageError
from stepmill.spec.options import AutoresetMode, PoolOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SubprocessEnvManager(EnvManager):
    """Steps n_env Unity envs in processes, first come, first served.

    Every env that is not at work gets the actions of its policies; a step returns when at least one env has answered,
    with all answers that are here, at most one per env. An env that is slow holds up nobody.

    An env that crashes (an exception of the env, its connection or its time limit; a killed process) is made anew in
    another process, within its quota, while the others go on: its agents' episodes end as interrupted, and its first
    step comes when it is there. An env that is stopped on purpose is left out, and is no crash. All other exceptions
    are raised as themselves.

    Differs from the original: it does not spin while it waits (U-B1), notices every exception and every death at once
    (U-B2, U-B4), sends timers only when asked (U-B5), can ask policies once for all workers (U-B6), moves observations
    through shared memory (U-B7), answers questions while envs are at work (U-B8), resets only the env that crashed
    (U-B9), and can be deterministic (U-B10).

    Args:
        env_factory: `env_factory(worker_id, side_channels)` returns a BaseEnv of either generation; called in the
            worker, whose ids are 0 to n_env - 1. What it raises is raised by the first `reset`.
        engine_configuration: an EngineConfig, ML-Agents' RunOptions, or None for the defaults.
        n_env: how many workers.
        run_options: another name of engine_configuration, as in the second generation.
        options: everything else.
        **keywords: fields of ManagerOptions by name, in place of `options` or over it.
    Raises:
        UsageError: a keyword is no option; names the nearest one.
        UnitySideChannelException: a width without a height, or the other way round.
    """

    def __init__(
        self,
        env_factory: Callable[..., Any],
        engine_configuration: Any = None,
        n_env: int = 1,
        *,
        run_options: Any = None,
        options: ManagerOptions | None = None,
        **keywords: Unpack[ManagerKeywords],
    ) -> None:
        super().__init__()
        if n_env < 1:
            raise UsageError(f"n_env={n_env!r} must be 1 or more")
        if engine_configuration is not None and run_options is not None:
            raise UsageError("engine_configuration and run_options are two names of one argument; give one of them")
        given = run_options if engine_configuration is None else engine_configuration
        self.options = merge_manager_options(options, keywords)
        settings = read_settings(given, self.options.restarts)
        makers = [
            WorkerMaker(
                env_factory,
                worker_id,
                settings.engine,
                None if self.options.seed is None else self.options.seed + worker_id,
                self.options.channel_factory,
                self.options.payload_bytes,
            )
            for worker_id in range(n_env)
        ]
        self.env_workers = [UnityEnvWorker(worker_id) for worker_id in range(n_env)]
        self.env_parameters: dict[str, Any] = {}
        self._pool = Pool(makers, backend="process", options=_pool_options(self.options))
        self._supervisor = Supervisor(self._pool, self.env_workers, settings.restarts, self.options)
        self._specs: dict[str, Any] = {}
        self._is_closed = False
        for worker, news in zip(self.env_workers, self._pool.call("news"), strict=True):
            self._note_news(worker, news)

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def _step(self) -> list[EnvironmentStep]:
        with self._supervisor:
            self._queue_steps()
            while self._is_awaited():
                self._supervisor.check_waiting()
                self._await(self._num_waiting() if self.options.is_deterministic else 1, None)
        if self._supervisor.was_crash and self.options.on_crash is OnCrash.RESET_ALL:
            self.reset()
            steps, self.first_step_infos = self.first_step_infos, []
            return steps
        steps = self._supervisor.take_answers()
        return sorted(steps, key=lambda step: step.worker_id) if self.options.is_deterministic else steps

    def _is_awaited(self) -> bool:
        """Whether a step has to go on waiting: for somebody, or for everybody who is at work."""
        return not self._supervisor.is_any_answer or (self.options.is_deterministic and self._num_waiting() > 0)

    def _num_waiting(self) -> int:
        return sum(worker.waiting for worker in self.env_workers)

    def _queue_steps(self) -> None:
        """Give every worker that waits for one a command: a step, or a reset if its env was never reset."""
        for worker in self._in(WorkerState.NEW):
            self._supervisor.reset(worker)
        ready = self._in(WorkerState.READY)
        if not ready:
            return
        decided = self._decisions([worker.previous_step for worker in ready])
        for worker, infos in zip(ready, decided, strict=True):
            worker.previous_all_action_info = infos
        self._supervisor.step({w.worker_id: plain_actions(w.previous_all_action_info, w.previous_step) for w in ready})

    def _in(self, *states: WorkerState) -> list[UnityEnvWorker]:
        return [worker for worker in self.env_workers if worker.state in states]

    # ---- what comes back --------------------------------------------------------------------------------------------

    def _await(self, num_wanted: int, timeout_s: float | None) -> None:
        """Wait for so many workers, and take in what is here. Failures are dealt with; what cannot be is raised."""
        try:
            batch = self._pool.recv(min_envs=num_wanted, max_envs=len(self.env_workers), timeout_s=timeout_s)
        except RecvTimeout:
            raise
        except StepmillError as error:
            self._supervisor.on_error(error)
        else:
            for worker_id, answer in zip(batch.env_id, batch.obs, strict=True):
                self._take_in(self.env_workers[worker_id], answer)
        self._supervisor.raise_failure()

    def _take_in(self, worker: UnityEnvWorker, answer: tuple[Any, ...]) -> None:
        if answer[0] == "failed":
            self._supervisor.on_failure(worker, answer[1])
            return
        _, results, stats, news = answer
        if news is not None:
            self._note_news(worker, news)
        self._supervisor.on_step(worker, unpack(results), stats)

    def _note_news(self, worker: UnityEnvWorker, news: Mapping[str, Any]) -> None:
        worker.properties = news["properties"]
        worker.players = news["players"]
        specs = news["specs"]
        self._specs.update({name: unpack_spec(spec) for name, spec in specs.items() if name not in self._specs})

    # ---- resets -----------------------------------------------------------------------------------------------------

    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        self.set_env_parameters(config)
        with self._supervisor:
            self._settle(self.options.drain_timeout_s)
            self._supervisor.check_left()
            for worker in self._in(WorkerState.NEW, WorkerState.READY):
                self._supervisor.reset(worker)
            for worker in self._in(WorkerState.BROKEN):
                self._supervisor.renew(worker)
            self._settle(None)
        self._supervisor.check_left()
        return [worker.previous_step for worker in self._in(WorkerState.READY)]

    def _settle(self, drain_timeout_s: float | None) -> None:
        """Wait until no worker is at work, and drop what they return. Steps under way have a time limit."""
        deadline = None if drain_timeout_s is None else time.monotonic() + drain_timeout_s
        while any(worker.waiting for worker in self.env_workers):
            is_stepping = bool(self._in(WorkerState.STEPPING))
            left = None if deadline is None or not is_stepping else max(deadline - time.monotonic(), 0.0)
            try:
                self._await(1, left)
            except RecvTimeout as exc:
                stuck = {worker.worker_id for worker in self._in(WorkerState.STEPPING)}
                raise UnityStuckError(
                    f"Workers {stuck} stuck in waiting state for {drain_timeout_s:g} s; give a step_timeout_s, which ends them"
                ) from exc
        self._supervisor.take_answers()

    # ---- parameters and questions -----------------------------------------------------------------------------------

    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send parameters to all envs, with their next step or reset; kept, and sent again to an env that is made anew.

        Args:
            config: by name a number, or a sampler: UniformSettings, GaussianSettings, MultiRangeUniformSettings, or
                ML-Agents' own. Numbers are float properties in the first generation. None is none.
        """
        checked = checked_parameters(config)
        self.env_parameters.update(checked)
        for worker in self.env_workers:
            worker.parameters.update(checked)
        self._supervisor.parameters = self.env_parameters

    def on_training_started(self, behavior_name: str, trainer_settings: Any) -> None:
        """Tell every side channel that has `training_started(behavior_name, settings)`, with the env's next command."""
        for worker in self.env_workers:
            worker.calls.append(("start_training", (behavior_name, trainer_settings)))

    def call_channel(
        self, channel: Any, method: str, *args: Any, worker_ids: Sequence[int] | None = None
    ) -> tuple[Any, ...]:
        """Call a method of a side channel in the workers, after the commands sent to them before.

        Args:
            channel: its UUID, or the name of its class.
            method: of the channel.
            *args: for the method.
            worker_ids: which workers; None is all.
        Returns:
            One result per worker.
        """
        return self._pool.call("call_channel", channel, method, *args, env_ids=worker_ids)

    @property
    def training_behaviors(self) -> dict[str, Any]:
        """The specs of all behaviours that any env has shown so far, by name. Never waits for an env."""
        return dict(self._specs)

    @property
    def get_properties(self) -> dict[str, float]:
        """The float properties of worker 0's env, as of its newest answer. Never waits for the env."""
        return dict(self.env_workers[0].properties)

    @property
    def restart_counts(self) -> list[int]:
        """How often each worker was restarted after a crash."""
        return list(self._supervisor.quota.counts)

    @property
    def stopped_workers(self) -> list[int]:
        """Workers whose env was stopped on purpose; they are left out."""
        return [worker.worker_id for worker in self._in(WorkerState.STOPPED)]

    def get_timer_tree(self) -> dict[str, Any]:
        """Return where the time went: the learner's timers, and under `workers` those of all workers as one.

        Times in seconds; gauges are at the root. The learner's own timers are on once it calls `stepmill.timers.enable`.
        """
        return timer_tree(self._pool)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the envs, at the same time, in `close_timeout_s` at most; idempotent. Who takes longer is ended, and told."""
        late: list[int] = []
        if not self._is_closed:
            idle = [worker.worker_id for worker in self._in(WorkerState.NEW, WorkerState.READY)]
            deadline = time.monotonic() + self.options.close_timeout_s
            publish_timers(self._pool, idle, self.options.close_timeout_s / 2)
            late = self._supervisor.shut(deadline - time.monotonic())
        self._is_closed = True
        if late:
            logger.error("workers %s did not close their envs in time; their processes are ended", late)
        self._pool.close()
        for worker in self.env_workers:
            end_players(worker.players)  # of those that had to be killed; the others' have ended
            worker.players = []


def _pool_options(options: ManagerOptions) -> PoolOptions:
    return PoolOptions(
        envs_per_worker=1,
        context=options.context,
        autoreset_mode=AutoresetMode.DISABLED,  # agents have episodes, and Unity begins them
        episode_stats=False,
        step_timeout_s=options.step_timeout_s,
        reset_timeout_s=options.reset_timeout_s,
        start_timeout_s=options.start_timeout_s,
        timers_every=options.timers_every,
    )
