"""Replays the episode of a crash capsule up to the step that failed, and reports whether it fails again.

An env that raised is replayed in this process, where a debugger can inspect it. An env that crashed its process or hung is
replayed in a separate process, because it may crash or hang again.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import numpy as np

from stepmill.pool.capsule import RESULTS, Capsule
from stepmill.pool.crash_reporter import versions
from stepmill.pool.pool import Pool
from stepmill.pool.stats import read_outcome
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import AutoresetMode, BackendName, Context, PoolOptions, Restarts, Seeding
from stepmill.spec.tree import leaves, opaques, unflatten

EnvFn = Callable[[], object]

HANG_S = 30.0  # limit for a step that hung, if the pool had none
_NEEDS_PROCESS = ("died", "timed_out")
_CALLS: dict[str, Callable[[Pool, Any], object]] = {  # kinds of calls of an env, which can be repeated
    "render": lambda pool, _: pool.render(),
    "call": lambda pool, payload: pool.call(payload[0], *payload[1], **payload[2]),
    "set_attr": lambda pool, payload: pool.set_attr(payload[0], list(payload[1])),
    "get_properties": lambda pool, _: pool.properties.list(),
    "set_property": lambda pool, payload: pool.properties.set(payload[0], list(payload[1])),
}


class Verdict(str, Enum):
    """The outcome of a replay. Only REPRODUCED gives exit status 0."""

    REPRODUCED = "reproduced"  # the same failure, at the same step
    DIFFERENT_FAILURE = "failed differently"  # another failure, or at another step
    NOT_REPRODUCED = "not reproduced"  # nothing failed
    NOT_REPLAYABLE = "not replayable"  # the capsule lacks the episode


@dataclass(frozen=True)
class Divergence:
    """The first result that differs from the recorded one. Step 0 is the reset."""

    step: int
    what: list[str]


@dataclass(frozen=True)
class Failure:
    """A failure in the replay. `step` is 0 for a reset and None for the constructor."""

    command: str
    step: int | None
    error_type: str
    message: str
    traceback: str


@dataclass
class Report:
    """The result of a replay."""

    verdict: Verdict = Verdict.NOT_REPRODUCED
    steps: int = 0
    failure: Failure | None = None
    divergence: Divergence | None = None
    differences: list[str] = field(default_factory=list)  # in the versions of libraries


class RecordingEnvFn:
    """An env_fn that records the exception that the env raised, with its frames, in `error`; a debugger uses it."""

    def __init__(self, env_fn: EnvFn) -> None:
        self._env_fn = env_fn
        self.error: BaseException | None = None

    def __call__(self) -> object:
        with self._recording():
            env = self._env_fn()
        for name in ("reset", "step"):
            with contextlib.suppress(AttributeError, TypeError):  # an env with __slots__ gets no debugger
                setattr(env, name, self._recorded(getattr(env, name)))
        return env

    def _recorded(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with self._recording():
                return method(*args, **kwargs)

        async def call_coroutine(*args: object, **kwargs: object) -> object:
            with self._recording():
                return await cast("Awaitable[object]", method(*args, **kwargs))

        return call_coroutine if inspect.iscoroutinefunction(method) else call

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = error
            raise


def code_to_run(capsule: Capsule, *, has_env: bool) -> list[str]:
    """Return what replaying this capsule runs: pickled values, and a call of the env. With `has_env` its env_fn is not used.

    The texts are those of the capsule, which may be wrong.
    """
    code = [f"{name}: {text}" for name, text in capsule.pickled.items() if name != "env_fn" or not has_env]
    if capsule.command == "call" and "call" not in capsule.pickled:
        code.append(f"{capsule.call} of the env: {capsule.load('call')!r}")
    return code


def env_fn_of(capsule: Capsule) -> EnvFn:
    """Return the env constructor of a trusted capsule. This imports the modules that it names.

    Raises:
        UsageError: the capsule has no constructor, or it cannot be imported here.
    """
    env_fn = capsule.load("env_fn")
    if not callable(env_fn):
        why = next((note for note in capsule.notes if note.startswith("the env_fn")), "the capsule has no env_fn")
        raise UsageError(f"{why}; pass a function that makes the env with --env module:function")
    found: EnvFn = env_fn
    return found


def replay(capsule: Capsule, env_fn: EnvFn, *, in_process: bool) -> Report:
    """Replay the episode of a capsule.

    Args:
        capsule: the capsule; if it has pickles that the replay needs, a trusted one.
        env_fn: the function that makes the env.
        in_process: whether to replay in this process even if the env crashed its process or hung.
    Raises:
        UsageError: the action space of the env is not the one in the capsule.
    """
    report = Report(differences=_differences(capsule))
    is_call_unknown = capsule.command == "call" and (capsule.call not in _CALLS or "call" not in capsule.parts)
    if is_call_unknown or (not capsule.is_whole and capsule.command in ("step", "call", "")):
        report.verdict = Verdict.NOT_REPLAYABLE
        return report
    backend = BackendName.SERIAL if in_process or capsule.kind not in _NEEDS_PROCESS else BackendName.PROCESS
    run = _Run(capsule, report)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Pool([env_fn], backend=backend, options=_options(capsule, backend, folder)) as pool,
        ):
            run.play(pool)
    except UsageError:
        raise
    except StepmillError as error:
        report.failure = run.failure(error)
        is_same = run.is_at_recorded_failure and _is_same(capsule, error)
        report.verdict = Verdict.REPRODUCED if is_same else Verdict.DIFFERENT_FAILURE
    return report


def _options(capsule: Capsule, backend: BackendName, folder: str) -> PoolOptions:
    is_serial = backend is BackendName.SERIAL  # time limits have no effect there

    def limit(name: str) -> float | None:
        value = capsule.pool.get(name)
        known = float(value) if isinstance(value, (int, float)) and value > 0 else None
        return known or (HANG_S if capsule.kind == "timed_out" else None)

    is_batched = capsule.pool.get("is_batched") is True
    mode = capsule.pool.get("autoreset_mode") if is_batched else AutoresetMode.DISABLED
    return PoolOptions(
        autoreset_mode=mode,  # type: ignore[arg-type]  # checked there
        context=Context.FORKSERVER if is_serial else Context.FORK,  # under fork the env_fn need not be pickled
        step_timeout_s=None if is_serial else limit("step_timeout_s"),
        reset_timeout_s=None if is_serial else limit("reset_timeout_s"),
        crash_dir=folder,  # with it the pool hashes the results
        seeding=Seeding.CONTINUE,  # a reset without a recorded seed gets none
        restarts=Restarts(max_restarts=0, max_env_errors=0),
        episode_stats=False,
    )


class _Run:
    """One replay: the current command and step, and the report so far."""

    def __init__(self, capsule: Capsule, report: Report) -> None:
        self._capsule = capsule
        self._report = report
        self._command = "construct"
        self._step: int | None = None
        self._opaque_actions: list[list[object]] = capsule.load("actions") or []

    @property
    def is_at_recorded_failure(self) -> bool:
        """Whether the current command is the one that failed in the capsule."""
        capsule = self._capsule
        is_command = self._command == capsule.command or (capsule.command, self._command) == ("step", "after")
        is_last = capsule.command != "step" or self._command == "after" or self._step == capsule.num_steps + 1
        return is_command and is_last and self._report.steps >= (capsule.num_steps if capsule.is_whole else 0)

    def failure(self, error: StepmillError) -> Failure:
        """Describe an error that the current command raised."""
        return Failure(
            command="reset" if self._command == "after" else self._command,
            step=self._step,
            error_type=error.error_type if isinstance(error, EnvError) else f"stepmill.{type(error).__name__}",
            message=error.message.removesuffix(f"; crash capsule: {error.capsule}"),
            traceback=error.remote_traceback if isinstance(error, EnvError) else "",
        )

    def play(self, pool: Pool) -> None:
        """Run the constructor, the episode and the command that failed. Returns normally if nothing fails."""
        capsule = self._capsule
        self._check_actions(pool)
        if capsule.command == "construct":
            return
        for name in capsule.parts:
            if name.startswith("attribute "):
                pool.set_attr(name.removeprefix("attribute "), [capsule.load(name)])
        if capsule.is_whole and not self._play_episode(pool):
            return
        if capsule.command == "step":
            is_over = self._step_env(pool, capsule.num_steps)
            if is_over and capsule.pool.get("autoreset_mode") == AutoresetMode.SAME_STEP.value:
                self._reset(pool, "after", capsule.command_seed, "command_options")
        elif capsule.command == "reset":
            self._reset(pool, "reset", capsule.command_seed, "command_options")
        elif capsule.command == "call":
            self._call(pool)

    def _play_episode(self, pool: Pool) -> bool:
        """Return whether the episode reached the end of the log; one that differs from the log may end earlier."""
        self._reset(pool, "begin", self._capsule.seed, "options")
        self._compare(pool, 0)
        for step in range(self._capsule.num_steps):
            is_over = self._step_env(pool, step)
            self._report.steps = step + 1
            self._compare(pool, step + 1)
            is_last = step + 1 == self._capsule.num_steps and self._capsule.command != "step"
            if is_over and not is_last and not pool.spec.is_batched:
                return False
        return True

    def _reset(self, pool: Pool, command: str, seed: int | list[int | None] | None, options: str) -> None:
        self._command, self._step = command, 0
        pool.reset(seed={0: seed} if isinstance(seed, int) else seed, options=[self._capsule.load(options)])

    def _step_env(self, pool: Pool, step: int) -> bool:
        self._command, self._step = "step", step + 1
        arrays = [np.array(leaf)[np.newaxis] for leaf in self._capsule.action(step)]
        if pool.spec.is_batched:
            arrays = [array[0] for array in arrays]
        columns = [[part] for part in self._opaque_actions[step]] if self._opaque_actions else []
        batch = pool.step(unflatten(pool.spec.action, arrays, columns))
        return bool((batch.terminated | batch.truncated).any())

    def _call(self, pool: Pool) -> None:
        if self._capsule.num_actions > self._capsule.num_steps:
            self._step_env(pool, self._capsule.num_steps)  # this step was running when the call was made
        self._command = "call"
        _CALLS[self._capsule.call](pool, self._capsule.load("call"))

    def _compare(self, pool: Pool, step: int) -> None:
        if self._report.divergence is not None:
            return
        here = read_outcome(pool._runtime, 0)
        recorded = [self._capsule.arrays[name][step] for name in RESULTS]
        names = ("reward", "terminated or truncated", "observation")
        what = [
            name
            for name, now, then in zip(names, here, recorded, strict=True)
            if now != then and not (now != now and then != then)
        ]
        if what:
            self._report.divergence = Divergence(step, what)

    def _check_actions(self, pool: Pool) -> None:
        if self._capsule.command == "construct" or not self._capsule.num_actions:
            return
        rows = () if not pool.spec.is_batched else (pool.spec.batch_size,)
        wanted = [(leaf.dtype, (*rows, *leaf.shape)) for _, leaf in leaves(pool.spec.action)]
        given = [(leaf.dtype, leaf.shape) for leaf in self._capsule.action(-1)]
        num_opaques = len(opaques(pool.spec.action))
        opaque_actions = self._opaque_actions or [[]] * self._capsule.num_actions
        are_equal = len(opaque_actions) == self._capsule.num_actions and len(opaque_actions[-1]) == num_opaques
        if given != wanted or not are_equal:
            raise UsageError(
                "the action space of this env is not the one in the capsule; pass the env that failed with --env"
            )


def _is_same(capsule: Capsule, error: StepmillError) -> bool:
    if isinstance(error, EnvError):
        return capsule.kind in ("raised", "bad_action") and error.error_type == capsule.error_type
    if isinstance(error, WorkerDied):
        is_end = (error.exit_code, error.signal_name) == (capsule.exit_code, capsule.signal_name)
        return capsule.kind == "died" and is_end
    if isinstance(error, EnvTimeout):
        return capsule.kind == "timed_out"
    return isinstance(error, BadOutput) and capsule.kind == "bad_output"


def _differences(capsule: Capsule) -> list[str]:
    here = versions()
    return [
        f"{name} was {recorded} when the capsule was written and is {here[name]} here"
        for name, recorded in capsule.versions.items()
        if name in here and here[name] != recorded
    ]
