"""`FastParallelEnvironment`: many ALF environments as one batched environment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepmill.envs.alf import LAST, PROGRESS, AlfEnvMaker
from stepmill.frontends.alf import errors, nests
from stepmill.frontends.alf.configuration import AlfKeywords, Arguments, signature_of
from stepmill.frontends.alf.handles import AlfSpecs, EnvHandle, HasSpecs, call_one, check_specs
from stepmill.frontends.alf.nests import check_actions, converter, fields_converter, with_attributes, with_local_classes
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort
from stepmill.spec.batch import Batch
from stepmill.spec.closing import CloseAtEnd, close_on_error
from stepmill.spec.errors import BusyEnvError, ClosedPoolError, SpecMismatch, StepmillError, UsageError, raising_as
from stepmill.spec.options import Context, PoolOptions
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import Leaf, TupleNode, leaves

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepmill.frontends.alf.nests import Convert

logger = logging.getLogger("stepmill.frontends.alf")
_LOG_EVERY = 100  # closed processes
_LAST = ("torch_num_threads_per_env", "start_method")  # arguments of `*threads_and_start`


class FastParallelEnvironment(CloseAtEnd, HasSpecs):
    """Steps N ALF environments together, each in its own process, and returns TimeSteps of tensors [N, ...].

    An env whose step was LAST is reset at once, in the background; the next `step` ignores its action and returns its
    FIRST TimeStep. With spare envs, another env that is already reset takes the slot instead, in an order that depends
    only on the data. `env_id` of a TimeStep is always the slot, 0 to N-1.

    Tensors stay valid: their memory is not written while they are referenced (ALF copies each step). If an env raises,
    dies or hangs, `step` raises a RuntimeError that names it, and `reset` restarts what has failed.

    Args:
        env_constructors: called in the processes as `constructor(env_id=i)`, 0 to N + spares - 1.
        start_serially: build one env after the other. False builds all at once (ALF's default is True).
        blocking, flatten: without effect, as in ALF.
        num_spare_envs_for_reload: the number of spares, which are the last of the envs. It is refused for batched envs, as in
            ALF, because each resets its own rows when they end. `resets.spare_envs` of the options is allowed: a spare replaces
            a batched env if all rows of it end in one step.
        torch_num_threads_per_env: threads of torch, OpenMP and BLAS in each process, 1 by default; None does not change them.
        start_method: "fork" (the default), "spawn" or "forkserver". The following arguments are given by keyword.
        num_workers: the number of processes; None gives each env its own. Fewer processes are faster for fast envs.
        as_tensors: True for tensors, False for NumPy arrays; None means tensors if torch is installed.
        device: the device of the tensors; `time_step._cpu` is then the copy on the CPU. None means ALF's default device.
        options: the options of the pool; the arguments above take precedence.
    Raises:
        UsageError: the envs' specs differ (a ValueError with ALF's text), or an argument is wrong.
        EnvError: a constructor raised an exception. The error is also a RuntimeError, with the traceback.
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[..., object]],
        start_serially: bool = False,
        blocking: bool = False,
        flatten: bool = True,
        num_spare_envs_for_reload: int = 0,
        *threads_and_start: int | str | None,
        **keywords: Unpack[AlfKeywords],
    ) -> None:
        own = Arguments.read(keywords, threads_and_start, _LAST)
        makers = [AlfEnvMaker(constructor, env_id) for env_id, constructor in enumerate(env_constructors)]
        wanted = 0 if own.options is None else own.options.resets.spare_envs
        self._num_spares = _checked_spares(num_spare_envs_for_reload or wanted, len(makers))
        self._num_spares_for_reload = num_spare_envs_for_reload
        self._current_time_step: Any = None
        self._is_started = self._closed = False
        self._num_envs = len(makers)
        self._is_tensor_based = nests.is_torch_here() if own.as_tensors is None else own.as_tensors
        # Errors of torch come before any process is started.
        self._as_leaf = nests.to_tensor() if self._is_tensor_based else None
        device = nests.default_device() if own.device is None else own.device
        self._move_leaf = nests.mover(device) if self._is_tensor_based else None
        self._makers = makers
        self._options = own.pool_options(start_serially=start_serially, num_spares=self._num_spares)
        self.start()

    def start(self) -> None:
        """Start the processes, and wait until all envs are built. The constructor calls it; a second call is refused.

        Raises:
            NotStartedError: the environment was started before.
            UsageError, EnvError: as in the constructor.
        """
        if self._is_started:
            raise errors.NotStartedError("Cannot start() FastParallelEnvironment multiple times; make another one")
        self._pool, self._all_specs = _start(self._makers, self._options, self._num_spares_for_reload)
        self._is_started = True
        self._specs = self._all_specs[0]
        self._batch_size = self._pool.num_rows
        handles = [EnvHandle(self._pool, env_id, specs) for env_id, specs in enumerate(self._all_specs)]
        self._envs, self._spare_envs = handles[: self._pool.num_envs], handles[self._pool.num_envs :]
        self._prepare(self._as_leaf, self._move_leaf)
        self._step_obs = PoolPort(self._pool).step_obs

    def _prepare(self, as_leaf: Convert | None, move: Convert | None) -> None:
        """Set how TimeSteps are built: `as_leaf` converts each array, and `move` copies a tensor to another device."""
        node = with_local_classes(self._pool.spec.observation)
        assert isinstance(node, TupleNode)
        cls: Any = node.factory
        self._fields: tuple[str, ...] = cls._fields
        place = self._fields.index("env_id")
        slot = node.children[place]
        assert isinstance(slot, Leaf)
        slots = np.arange(self._batch_size, dtype=slot.dtype)
        has_own = type(self)._to_tensor is not FastParallelEnvironment._to_tensor
        PoolPort(self._pool).set_observation_format(
            node, wrap=None if has_own else as_leaf, given={len(leaves(TupleNode(node.children[:place]))): slots}
        )
        self._to_arrays = converter(self._pool.spec.action, nests.to_array)
        self._as_tensors = converter(node, as_leaf) if has_own and as_leaf is not None else None
        parts = [] if move is None else [converter(child, move) for child in node.children]
        self._move = fields_converter(with_attributes(cls), parts) if parts else None
        self._must_convert = has_own or self._move is not None

    # ---- stepping -----------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all envs and spares, return each env to its own slot, and return the FIRST TimeSteps, [N, ...].

        Raises:
            EnvError, WorkerDied: an env could not be reset; also a RuntimeError.
        """
        self._current_time_step = time_step = self._reset()
        return time_step

    def _reset(self) -> Any:
        """Do what `reset` does, without storing the TimeStep. Subclasses may override it, as in ALF."""
        with raising_as(errors.as_runtime_error, self._fields):
            time_step = self._pool.reset().obs
        return self._to_tensor(time_step) if self._must_convert else time_step

    def step(self, action: Any) -> Any:
        """Step all envs and wait for all of them; before the first `reset`, reset them instead. Hot path.

        Args:
            action: a nest of tensors or arrays [N, ...], in the structure of `action_spec()`.
        Returns:
            A TimeStep, [N, ...] in every leaf.
        Raises:
            EnvError, WorkerDied, EnvTimeout: an env failed; also a RuntimeError. `reset` restarts it.
            TimeStepError: an env returned a TimeStep that its specs do not allow.
            ActionError: the action does not fit the action spec. Nothing was stepped.
        """
        if self._current_time_step is None:
            return self.reset()
        self._current_time_step = time_step = self._step(action)
        return time_step

    def _step(self, action: Any) -> Any:
        """Do what `step` does after the first `reset`, without storing the TimeStep. Subclasses may override it, as in ALF."""
        try:
            arrays = action if type(action) is np.ndarray else self._to_arrays(action)
            time_step = self._step_obs(arrays, _with_ends)
        except (StepmillError, LookupError, TypeError, ValueError) as error:
            raise self._explained(error, action) from error
        return self._to_tensor(time_step) if self._must_convert else time_step

    def _as_returned(self, batch: Batch) -> Any:
        """Return what `stepmill.restore` returns: the newest TimeStep."""
        self._current_time_step = time_step = self._to_tensor(batch.obs) if self._must_convert else batch.obs
        return time_step

    def current_time_step(self) -> Any:
        """Return the newest TimeStep; reset the envs if there is none."""
        return self.reset() if self._current_time_step is None else self._current_time_step

    def _to_tensor(self, stacked: Any) -> Any:
        """Return a TimeStep on the device, with the CPU's as its attribute `_cpu`.

        Subclasses may override it, as in ALF: it then gets a TimeStep of arrays.
        """
        time_step = stacked if self._as_tensors is None else self._as_tensors(stacked)
        if self._move is None:
            return time_step
        moved = self._move(time_step)
        moved._cpu = time_step
        return moved

    def _explained(self, error: Exception, action: Any) -> Exception:
        """Return the exception to raise for a step that failed."""
        is_refusal = not isinstance(error, StepmillError) or isinstance(error, UsageError)
        if is_refusal and not isinstance(error, (BusyEnvError, ClosedPoolError)):
            node = self._pool.spec.action
            try:
                check_actions(node, _arrays_as_they_are(action), self._batch_size)
            except errors.ActionError as explained:
                return explained
        return errors.as_runtime_error(error, self._fields) if isinstance(error, StepmillError) else error

    # ---- calls --------------------------------------------------------------------------------------------------

    def call_envs_with_same_args(self, func_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all envs at the same time; return the results by slot."""
        return [promise() for promise in [env.call(func_name, *args, **kwargs) for env in self._envs]]

    def seed(self, seeds: Sequence[Any]) -> list[Any]:
        """Call `seed` of all envs and spares at the same time; return the results.

        Raises:
            UsageError: the number of seeds differs from that of envs and spares.
        """
        if len(seeds) != len(self._all_specs):
            raise UsageError(
                "Number of seeds should match the number of parallel_envs."
                f" There are {len(seeds)} seeds for {len(self._envs)} envs and {self._num_spares} spares."
            )
        promises = [call_one(self._pool, env_id, "seed", seed) for env_id, seed in enumerate(seeds)]
        return [promise() for promise in promises]

    def sync_progress(self, progress: Mapping[str, float] | None = None) -> None:
        """Send the training progress to all envs and spares, and to envs that are restarted later.

        Args:
            progress: numbers by name; None takes them from ALF's schedulers. They are set in ALF's schedulers in the
                processes, and passed to `update_all_progresses` of envs that have this method.
        """
        if progress is None:
            from alf.utils.schedulers import get_all_progresses  # type: ignore[import-not-found]  # ALF is not on PyPI

            progress = get_all_progresses()
        self._pool.set_attr(PROGRESS, dict(progress))

    def render(self, mode: str = "rgb_array") -> Any:
        """Return the result of env 0's `render(mode)`."""
        return self._envs[0].render(mode)

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def envs(self) -> list[EnvHandle]:
        """The env of each slot."""
        return self._envs

    @property
    def num_envs(self) -> int:
        """The number of envs, without the spares."""
        return len(self._envs)

    @property
    def num_spare_envs_for_reload(self) -> int:
        """The number of spares."""
        return self._num_spares

    @property
    def is_tensor_based(self) -> bool:
        """Whether TimeSteps contain tensors."""
        return self._is_tensor_based

    @property
    def batched(self) -> bool:
        """True: TimeSteps have a batch dimension."""
        return True

    @property
    def batch_size(self) -> int:
        """N, the number of envs times the batch size of each env."""
        return self._batch_size

    @property
    def num_tasks(self) -> int:
        """The number of tasks of env 0."""
        return self._specs.num_tasks

    @property
    def task_names(self) -> Sequence[str]:
        """The names of the tasks of env 0."""
        return self._specs.task_names

    @property
    def metadata(self) -> Any:
        """The metadata of env 0, read from its process."""
        return self._envs[0].metadata

    # ---- the end ------------------------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        return self._pool.stats()

    def close(self) -> None:
        """Close all envs and spares and end their processes, in about two seconds at most. Idempotent."""
        if not self._closed:
            self._closed = True
            logger.info("Closing all processes.")
            self._pool.close()
            for num_closed in range(_LOG_EVERY, len(self._all_specs) + 1, _LOG_EVERY):
                logger.info("Closed %d processes", num_closed)


FastParallelEnvironment.__signature__ = signature_of(FastParallelEnvironment, _LAST)  # type: ignore[attr-defined]


def _with_ends(results: tuple[Any, ...]) -> Any:
    """Return the TimeStep of a step. Where a fault has cut an episode short, it repeats the last one: make that the end, without a reward."""
    time_step, *_, info = results
    if "fault" in info:
        rows = np.flatnonzero(info["_fault"])
        time_step.step_type[rows], time_step.reward[rows] = LAST, 0
    return time_step


def _start(makers: Sequence[AlfEnvMaker], options: PoolOptions, num_reload: int) -> tuple[Pool, list[AlfSpecs]]:
    """Start the pool, check the specs of all envs, and log as ALF does. `num_reload` is num_spare_envs_for_reload."""
    verb = "Forking" if options.context is Context.FORK else "Spawning"
    logger.info("%s all %d processes.", verb, len(makers) - options.resets.spare_envs)
    if not options.start.serially:
        logger.info("Waiting for all processes to start.")
    try:
        pool = Pool(makers, options=options)
    except SpecMismatch as mismatch:
        _check_batches([AlfSpecs.of(spec) for spec in mismatch.specs], num_reload)
        raise
    except StepmillError as error:
        raise errors.as_runtime_error(error) from error
    with close_on_error(pool.close):
        port = PoolPort(pool)
        all_specs = [AlfSpecs.of(spec) for spec in (*port.env_specs, *port.spare_specs)]
        _check_batches(all_specs, num_reload)
    logger.info("All processes started.")
    return pool, all_specs


def _check_batches(all_specs: Sequence[AlfSpecs], num_reload: int) -> None:
    check_specs(all_specs)
    if num_reload and all_specs[0].batched:
        raise errors.SpareEnvError(
            "num_spare_envs != 0 is not supported when batch_size_per_env > 0. "
            f"batch_size_per_env={all_specs[0].batch_size}, num_spare_envs={num_reload}: batched envs reset their own "
            f"rows; if all rows of an env end together, give resets={{'spare_envs': {num_reload}}} instead"
        )


def _checked_spares(num_spares: int, num_envs: int) -> int:
    if not 0 <= num_spares < max(num_envs, 1):
        raise UsageError(
            f"num_spare_envs_for_reload={num_spares} of {num_envs} env_constructors leaves no env to step; "
            "give more constructors, or fewer spares"
        )
    return num_spares


def _arrays_as_they_are(nest: Any) -> Any:
    """Return a nest of any structure with its tensors as arrays."""
    if isinstance(nest, Mapping):
        return {key: _arrays_as_they_are(child) for key, child in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_arrays_as_they_are(child) for child in nest)
    if isinstance(nest, list) and any(isinstance(child, (dict, tuple)) or hasattr(child, "shape") for child in nest):
        return [_arrays_as_they_are(child) for child in nest]
    return nests.to_array(nest)
