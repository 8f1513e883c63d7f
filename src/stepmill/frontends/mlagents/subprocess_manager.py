"""The manager of many Unity envs, each in a process. It returns results as soon as one env has a result."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepmill.frontends.mlagents.engine_workers import EngineWorkers
from stepmill.frontends.mlagents.manager import EnvManager
from stepmill.frontends.mlagents.pipe_workers import PipeWorkers, end_processes
from stepmill.frontends.mlagents.settings import (
    ManagerKeywords,
    ManagerOptions,
    RestartLimits,
    merge_manager_options,
    read_engine,
    read_limits,
)
from stepmill.frontends.mlagents.steps import EnvironmentStep
from stepmill.frontends.mlagents.timing import timer_tree
from stepmill.frontends.mlagents.workers import EngineWorker, UnityEnvWorker
from stepmill.pool.pool import Pool
from stepmill.spec.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SubprocessEnvManager(EnvManager):
    """Steps n_env Unity envs in processes and returns the results that come first.

    Every env that is not busy gets the actions of its policies. A step returns when at least one env has a result, with all
    results that are available, at most one per env. A slow env does not delay the others.

    An env crashes if it, its connection or its time limit raises an exception, or if its process is killed. It is
    rebuilt in another process, within its quota, while the others continue. The episodes of its agents end as
    interrupted, and its first step comes when it is ready. An env that is stopped deliberately is left out, and does
    not count as a crash. All other exceptions are raised unchanged.

    This manager differs from the original. It does not spin while it waits, notices every exception and every death at
    once, sends timers only on request, can call policies once for all workers, moves observations through shared
    memory, answers queries while envs are busy, resets only the env that crashed, and can be deterministic.

    Subclasses may override `_take_step`, `_reset_env` and `create_worker`. If `create_worker` returns workers that have their
    own processes, these are driven by ML-Agents' messages, and the engine is not used.

    Args:
        env_factory: `env_factory(worker_id, side_channels)` returns a BaseEnv of either generation. It is called in the
            workers, whose ids are 0 to n_env - 1. Its exception is raised by the first `reset`.
        run_options: ML-Agents' RunOptions, an EngineConfig as in the first generation, or None for the defaults.
        n_env: the number of workers.
        engine_configuration: another name of run_options, as in the first generation.
        options: all other settings.
        **keywords: fields of ManagerOptions by name, in place of `options` or with precedence over it.
    Raises:
        UsageError: a keyword is not an option (the text names the nearest option), or there are workers of both kinds.
        UnitySideChannelException: a width without a height, or the other way round.
    """

    NOT_CALLED = dict.fromkeys(
        (
            *("_assert_worker_can_restart", "_drain_step_queue", "_drop_old_restart_timestamps", "_postprocess_steps"),
            *("_queue_steps", "_restart_failed_workers", "_worker_has_restart_quota"),
        ),
        "override _take_step(), _step(), _reset_env() or create_worker(), give options, or use ML-Agents' class",
    )

    def __init__(
        self,
        env_factory: Callable[..., Any],
        run_options: Any = None,
        n_env: int = 1,
        *,
        engine_configuration: Any = None,
        options: ManagerOptions | None = None,
        **keywords: Unpack[ManagerKeywords],
    ) -> None:
        super().__init__()
        _join_to_mlagents()
        if n_env < 1:
            raise UsageError(f"n_env={n_env!r} must be 1 or more")
        if engine_configuration is not None and run_options is not None:
            raise UsageError("engine_configuration and run_options are two names of one argument; give one of them")
        self.env_factory = env_factory
        self.run_options = engine_configuration if run_options is None else run_options
        self.options = merge_manager_options(options, keywords)
        self.env_parameters: Any = {}
        # Only processes that a subclass starts use the queue, because the engine's results are in shared memory.
        self.step_queue: Any = None if self.create_worker is _create_engine_worker else multiprocessing.Queue()
        self.env_workers: list[UnityEnvWorker] = []
        read_engine(self.run_options)  # raises here if the workers would
        limits = self.options.restarts or read_limits(self.run_options)
        try:
            for worker_id in range(n_env):
                self.env_workers.append(
                    self.create_worker(worker_id, self.step_queue, self.env_factory, self.run_options)
                )
            self._driver = self._make_driver(limits)
        except BaseException:
            end_processes(self.env_workers)
            raise

    def _make_driver(self, limits: RestartLimits) -> EngineWorkers | PipeWorkers:
        of_engine = [worker for worker in self.env_workers if isinstance(worker, EngineWorker)]
        if not of_engine:
            return PipeWorkers(self, limits, self.options)
        if len(of_engine) < len(self.env_workers):
            raise UsageError(
                f"create_worker() returned {len(of_engine)} workers of the engine and "
                f"{len(self.env_workers) - len(of_engine)} with processes of their own; return one kind for all worker ids"
            )
        return EngineWorkers(self, of_engine, limits, self.options)

    @staticmethod
    def create_worker(
        worker_id: int,
        step_queue: Any,  # noqa: ARG004 - for workers that a subclass starts
        env_factory: Callable[..., Any],
        run_options: Any,
    ) -> UnityEnvWorker:
        """Return the worker for an id. The manager calls this once for each worker when it is made.

        A subclass may change the factory and the run options of a worker and call this method, or return a
        UnityEnvWorker with a process that it has started. `worker` is a function for such a process. After a crash of
        such a process, the method is called again.
        """
        return EngineWorker(worker_id, env_factory, run_options)

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def _step(self) -> list[EnvironmentStep]:
        return self._driver.step()

    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        return self._driver.reset(config)

    # ---- parameters and queries -------------------------------------------------------------------------------------

    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send parameters to all envs with their next step or reset, and again to an env that is rebuilt.

        Args:
            config: for each name, a number or a sampler, which is a UniformSettings, GaussianSettings,
                MultiRangeUniformSettings, or one of ML-Agents' own. Numbers are float properties in the first
                generation. None sends nothing.
        """
        self._driver.set_parameters(config)

    def on_training_started(self, behavior_name: str, trainer_settings: Any) -> None:
        """Call `training_started(behavior_name, settings)` of every side channel that has it, with the env's next command."""
        self._driver.start_training(behavior_name, trainer_settings)

    def call_channel(
        self, channel: Any, method: str, *args: Any, worker_ids: Sequence[int] | None = None
    ) -> tuple[Any, ...]:
        """Call a method of a side channel in the workers, after the commands that were sent to them before.

        Args:
            channel: the UUID of the channel, or the name of its class.
            method: the name of the method.
            *args: the arguments of the method.
            worker_ids: which workers; None means all.
        Returns:
            One result per worker.
        Raises:
            UsageError: the workers have their own processes.
        """
        return self._pool.call("call_channel", channel, method, *args, env_ids=worker_ids)

    @property
    def training_behaviors(self) -> dict[str, Any]:
        """The specs of all behaviours that any env has had so far, by name. This does not wait for an env of the engine."""
        return self._driver.behaviors

    @property
    def get_properties(self) -> dict[str, float]:
        """The float properties of worker 0's env, as of its newest result. This does not wait for the env."""
        return self._driver.properties

    @property
    def restart_counts(self) -> list[int]:
        """The number of restarts of each worker after a crash."""
        return list(self._driver.quota.counts)

    @property
    def stopped_workers(self) -> list[int]:
        """The workers whose env was stopped deliberately. They are left out of steps and resets."""
        return self._driver.stopped_workers if isinstance(self._driver, EngineWorkers) else []

    def get_timer_tree(self) -> dict[str, Any]:
        """Return where the time went: the learner's timers, and under `workers` those of all workers merged.

        Times are in seconds, and gauges are at the root. The learner's own timers are on once it calls
        `stepmill.timers.enable`.

        Raises:
            UsageError: the workers have their own processes.
        """
        return timer_tree(self._pool)

    @property
    def _pool(self) -> Pool:
        if isinstance(self._driver, EngineWorkers):
            return self._driver.pool
        raise UsageError(
            f"the workers of this {type(self).__name__} have processes of their own, which its create_worker() started; "
            "this method needs workers of the engine"
        )

    def close(self) -> None:
        """Close the envs at the same time, in at most `close_timeout_s`. Workers that take longer are ended."""
        self._driver.close()
        if isinstance(self.step_queue, multiprocessing.queues.Queue):
            self.step_queue.close()
            self.step_queue.join_thread()


def _join_to_mlagents() -> None:
    """Make the classes here subclasses of ML-Agents' classes if these are imported already. Their import takes seconds."""
    module = sys.modules.get("mlagents.trainers.subprocess_env_manager")
    manager, worker = (getattr(module, name, None) for name in ("SubprocessEnvManager", "UnityEnvWorker"))
    if manager is not None and not issubclass(manager, EnvManager):
        manager.register(SubprocessEnvManager)
    if worker is not None and not issubclass(UnityEnvWorker, worker):
        UnityEnvWorker.__bases__ += (worker,)  # the last base, so that no method of ours is replaced


_create_engine_worker = SubprocessEnvManager.create_worker
