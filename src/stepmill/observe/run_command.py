"""The commands `stepmill run` and `stepmill trace`: their options, and the run itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stepmill.observe.catalog import (
    EnvChoice,
    Policy,
    act_randomly,
    find_env,
    load_policy,
    search_current_directory,
)
from stepmill.observe.report import PlainView, QuietView, plural, summary_json, summary_text
from stepmill.observe.run import Run, RunPlan, Setup, Snapshot
from stepmill.observe.trace import trace, write_trace
from stepmill.observe.video import Recorder
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvTimeout, UsageError
from stepmill.spec.options import OnFault, PoolOptions, Seeding, Start, name_of_backend

if TYPE_CHECKING:
    import gymnasium


DEFAULT_SECONDS = 10.0  # the duration of a run that no option ends
RANDOM = "random"  # the policy of a run without one
WARM_UP_S = 0.2  # before a trace


@dataclass(frozen=True, kw_only=True)
class RunRequest(RunPlan):
    """The options of `stepmill run` and `stepmill trace`.

    Raises:
        UsageError: the batch size is larger than the number of envs, or options contradict each other.

    Attributes:
        options: fields of PoolOptions.
    """

    env_id: str
    policy: str = RANDOM
    env_kwargs: dict[str, object] | None = None
    options: dict[str, Any]
    atari: bool | None = None
    is_json: bool = False
    traceback: bool = False
    video: str | None = None
    video_dir: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.batch_size > self.num_envs:
            raise UsageError(
                f"--batch-size {self.batch_size} is larger than --num-envs {self.num_envs}; give {self.num_envs} or less"
            )
        if self.has_video and self.batch_size != self.num_envs:
            raise UsageError("--video and --video-dir show all envs at the same step; leave out --batch-size")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunRequest:
        """Return a request from the options of a command, as click parsed them; None means that an option was not given.

        Those that are not fields of this class are options of the pool.
        """
        own = {name: value for name, value in given.items() if name in cls.__dataclass_fields__}
        options = {name: value for name, value in given.items() if name not in own and value is not None}
        own["batch_size"] = own["batch_size"] or own["num_envs"]
        if own.get("steps") is None and own["seconds"] is None:
            own["seconds"] = DEFAULT_SECONDS
        return cls(**own, options=options)

    @property
    def has_video(self) -> bool:
        """Whether frames are recorded, so that the envs must render."""
        return self.video is not None or self.video_dir is not None

    def pool_options(self) -> PoolOptions:
        """Return the options of the pool. on_fault="replay" needs a seed for every episode."""
        is_replay = self.options.get("on_fault") == OnFault.REPLAY
        seeding = Seeding.PER_EPISODE if is_replay else Seeding.CONTINUE
        return PoolOptions(**self.options, seeding=seeding, start=Start(show_progress=not self.quiet))


def run_env(request: RunRequest) -> None:
    """Find the env, build the pool, run it, and print the summary. After a Ctrl-C, print the summary and raise it again."""
    search_current_directory()
    rendering = {"render_mode": "rgb_array"} if request.has_video else {}
    choice = find_env(request.env_id, atari=request.atari, env_kwargs={**rendering, **(request.env_kwargs or {})})
    with open_view(request) as view:
        setup, totals, is_interrupted = run_pool(request, choice, view)
    summarise = summary_json if request.is_json else summary_text
    print(summarise(setup, totals, is_interrupted=is_interrupted), flush=True)
    if is_interrupted:
        raise KeyboardInterrupt
    if totals.silent:
        raise EnvTimeout(
            f"envs {list(totals.silent)} had not answered for {totals.silence_s:.1f} s when the run ended; use --step-timeout "
            "and --reset-timeout to kill envs that hang",
            env_ids=list(totals.silent),
            timeout_s=totals.silence_s,
        )


def run_pool(request: RunRequest, choice: EnvChoice, view: QuietView) -> tuple[Setup, Snapshot, bool]:
    """Run the envs and show the run in the view. Return what ran, the totals, and whether Ctrl-C ended the run."""
    policy = act_randomly if request.policy == RANDOM else load_policy(request.policy)
    view.starting(f"{plural(request.num_envs, 'env')} of {choice.env_id}")
    begun_s = perf_counter()
    env_fns = [choice.make] * request.num_envs
    with (
        Recorder(request.video, request.video_dir, request.num_envs) as recorder,
        Pool(env_fns, batch_size=request.batch_size, options=request.pool_options()) as pool,
    ):
        start_s = perf_counter() - begun_s
        setup = Setup(
            env_id=choice.env_id,
            num_envs=request.num_envs,
            num_workers=pool.num_workers,
            backend=name_of_backend(pool.options.backend),
            batch_size=request.batch_size,
            policy=request.policy,
            seed=request.seed,
            is_atari=choice.is_atari,
            start_s=start_s,
        )
        view.began(setup, pool.stats)
        if request.has_video:
            policy = after_frame(policy, partial(recorder.add, pool.render))
        running = Run(pool, policy, request)
        is_interrupted = False
        try:
            for snapshot in running.snapshots(view.interval_s):
                view.show(snapshot)
        except KeyboardInterrupt:
            is_interrupted = True
        return setup, running.finish(), is_interrupted


def after_frame(policy: Policy, record_frame: Callable[[], None]) -> Policy:
    """Return a policy that records a frame of all envs before it acts."""

    def act(obs: object, action_space: gymnasium.Space[object]) -> object:
        record_frame()
        return policy(obs, action_space)

    return act


@contextmanager
def open_view(request: RunRequest) -> Iterator[QuietView]:
    """Choose the view: live on a terminal, plain lines in a pipe, and nothing on stdout but the document with --json."""
    if request.quiet:
        yield QuietView()
        return
    stream = sys.stderr if request.is_json else sys.stdout
    if not stream.isatty():
        yield QuietView() if request.is_json else PlainView(stream)
        return
    from rich.console import Console

    from stepmill.observe.monitor import open_run_view

    console = Console(file=stream)
    if console.is_dumb_terminal:
        yield PlainView(stream)
        return
    with open_run_view(console, request) as live:
        yield live


# ---- stepmill trace --------------------------------------------------------------------------------------------------


def trace_env(output: str, **options: Any) -> None:
    """Record a trace, write it to `output`, and print where it is. `options` are those of the command.

    Raises:
        UsageError: there is no such env, or the file cannot be written.
    """
    request = RunRequest.of({"seed": 0, **options})
    search_current_directory()
    choice = find_env(request.env_id, env_kwargs=request.env_kwargs)
    with Pool([choice.make] * request.num_envs, batch_size=request.batch_size, options=request.pool_options()) as pool:
        _drive(pool, replace(request, seconds=WARM_UP_S))
        with trace(pool) as recorder:
            _drive(pool, request)
    events = recorder.events
    write_trace(events, output)
    if request.quiet:
        return
    lost = f"; {events.num_lost} more were lost, record fewer envs or workers" if events.num_lost else ""
    sys.stdout.write(
        f"{events.num_events:,} events in {output}{lost}\nopen https://ui.perfetto.dev and drop {output} on it\n"
    )


def _drive(pool: Pool, plan: RunPlan) -> None:
    """Reset all envs, and step them with random actions."""
    for _ in Run(pool, act_randomly, plan).snapshots(math.inf):
        pass
    pool.reset()
