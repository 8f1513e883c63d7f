"""The command `stepmill run`: its options, and the run itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from stepmill.observe.catalog import EnvChoice, batch_actions, find_env
from stepmill.observe.policy import Policy, act_randomly, load_policy, search_current_directory
from stepmill.observe.report import PlainView, QuietView, plural, summary_json, summary_text
from stepmill.observe.run import Run, RunPlan
from stepmill.observe.snapshot import Setup, Snapshot
from stepmill.observe.video import Recorder
from stepmill.spec.errors import EnvTimeout, UsageError
from stepmill.spec.options import BackendName, Context, OnFault, PoolOptions, Seeding, Start, name_of_backend

if TYPE_CHECKING:
    import gymnasium


DEFAULT_SECONDS = 10.0  # the duration of a run that no option ends
RANDOM = "random"  # the policy of a run without one


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The options of `stepmill run` and `stepmill trace`, as click parsed them. None means that an option was not given."""

    env_id: str
    num_envs: int
    num_workers: int | None
    backend: str
    batch_size: int | None
    steps: int | None = None
    seconds: float | None
    seed: int | None
    policy: str = RANDOM
    env_kwargs: dict[str, object] | None = None
    context: str = Context.FORKSERVER.value
    step_timeout: float | None = None
    reset_timeout: float | None = None
    on_fault: str = OnFault.RAISE.value
    crash_dir: str | None = None
    atari: bool | None = None
    is_json: bool = False
    traceback: bool = False
    video: str | None = None
    video_dir: str | None = None
    quiet: bool = False

    def plan(self) -> RunPlan:
        """Fill in the defaults.

        Raises:
            UsageError: the batch size is larger than the number of envs, or options contradict each other.
        """
        batch_size = self.num_envs if self.batch_size is None else self.batch_size
        if batch_size > self.num_envs:
            raise UsageError(
                f"--batch-size {batch_size} is larger than --num-envs {self.num_envs}; give {self.num_envs} or less"
            )
        if self.has_video and batch_size != self.num_envs:
            raise UsageError("--video and --video-dir show all envs at the same step; leave out --batch-size")
        seconds = DEFAULT_SECONDS if self.steps is None and self.seconds is None else self.seconds
        return RunPlan(self.num_envs, batch_size, max_steps=self.steps, max_seconds=seconds, seed=self.seed)

    @property
    def has_video(self) -> bool:
        """Whether frames are recorded, so that the envs must render."""
        return self.video is not None or self.video_dir is not None

    def pool_options(self) -> PoolOptions:
        """Return the options of the pool. on_fault="replay" needs a seed for every episode."""
        return PoolOptions(
            backend=BackendName(self.backend),
            num_workers=self.num_workers,
            context=Context(self.context),
            step_timeout_s=self.step_timeout,
            reset_timeout_s=self.reset_timeout,
            on_fault=OnFault(self.on_fault),
            seeding=Seeding.PER_EPISODE if self.on_fault == OnFault.REPLAY.value else Seeding.CONTINUE,
            crash_dir=self.crash_dir,
            start=Start(show_progress=not self.quiet),
        )


def run_env(request: RunRequest) -> None:
    """Find the env, build the pool, run it, and print the summary. After a Ctrl-C, print the summary and raise it again."""
    plan = request.plan()
    search_current_directory()
    rendering = {"render_mode": "rgb_array"} if request.has_video else {}
    choice = find_env(request.env_id, atari=request.atari, env_kwargs={**rendering, **(request.env_kwargs or {})})
    with open_view(request, plan) as view:
        setup, totals, is_interrupted = run_pool(request, plan, choice, view)
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


def run_pool(request: RunRequest, plan: RunPlan, choice: EnvChoice, view: QuietView) -> tuple[Setup, Snapshot, bool]:
    """Run the envs and show the run in the view. Return what ran, the totals, and whether Ctrl-C ended the run."""
    from stepmill.pool.pool import Pool

    policy = act_randomly if request.policy == RANDOM else load_policy(request.policy)
    view.starting(f"{plural(plan.num_envs, 'env')} of {choice.env_id}")
    begun_s = perf_counter()
    env_fns = [choice.make] * plan.num_envs
    with (
        Recorder(request.video, request.video_dir, plan.num_envs) as recorder,
        Pool(env_fns, batch_size=plan.batch_size, options=request.pool_options()) as pool,
    ):
        start_s = perf_counter() - begun_s
        setup = Setup(
            env_id=choice.env_id,
            num_envs=plan.num_envs,
            num_workers=pool.num_workers,
            backend=name_of_backend(pool.options.backend),
            batch_size=plan.batch_size,
            policy=request.policy,
            seed=plan.seed,
            is_atari=choice.is_atari,
            start_s=start_s,
        )
        view.began(setup, pool.stats)
        if request.has_video:
            policy = after_frame(policy, partial(recorder.add, pool.render))
        running = Run(pool, policy, batch_actions(pool.single_action_space, plan.batch_size, plan.seed), plan)
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
def open_view(request: RunRequest, plan: RunPlan) -> Iterator[QuietView]:
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
    with open_run_view(console, plan) as live:
        yield live
