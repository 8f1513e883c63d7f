"""The commands `stepmill run` and `stepmill replay`, and the group of all commands. cli.py turns the exceptions raised here into exit statuses."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import click

from stepmill._version import __version__
from stepmill.observe.catalog import EnvChoice, batch_actions, find_env
from stepmill.observe.exit_status import ExitStatus, complain
from stepmill.observe.inspection_commands import bench, doctor, top, trace, tune
from stepmill.observe.options import COUNT, SECONDS, Arguments, choice_option, json_option
from stepmill.observe.policy import Policy, act_randomly, load_policy, search_current_directory
from stepmill.observe.report import PlainView, QuietView, View, plural, summary_json, summary_text
from stepmill.observe.run import Run, RunPlan
from stepmill.observe.snapshot import Setup, Snapshot
from stepmill.observe.video import Recorder
from stepmill.spec.errors import EnvTimeout, StepmillError, UsageError
from stepmill.spec.options import BackendName, Context, OnFault, PoolOptions, Seeding

if TYPE_CHECKING:
    import gymnasium

    from stepmill.observe.live import LiveView
    from stepmill.pool.pool import Pool

BACKENDS = ("auto", "serial", "thread", "process")
RANDOM = "random"
DEFAULT_NUM_ENVS = 8
DEFAULT_SECONDS = 10.0
CONTEXTS = tuple(context.value for context in Context)
POLICIES = tuple(policy.value for policy in OnFault)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The options of `stepmill run`, as click parsed them. None means that an option was not given."""

    env_id: str
    num_envs: int
    num_workers: int | None
    backend: str
    batch_size: int | None
    steps: int | None
    seconds: float | None
    seed: int | None
    policy: str
    env_kwargs: dict[str, object] | None = None
    context: str = Context.FORKSERVER.value
    step_timeout: float | None = None
    reset_timeout: float | None = None
    on_fault: str = OnFault.RAISE.value
    crash_dir: str | None = None
    atari: bool | None
    is_json: bool
    traceback: bool
    video: str | None = None
    video_dir: str | None = None
    frames: bool = False
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
        if self.has_frames and batch_size != self.num_envs:
            raise UsageError("--frames, --video and --video-dir show all envs at the same step; leave --batch-size out")
        if self.frames and self.quiet:
            raise UsageError("--frames shows the run and --quiet hides it; leave one of them out")
        seconds = DEFAULT_SECONDS if self.steps is None and self.seconds is None else self.seconds
        return RunPlan(self.num_envs, batch_size, max_steps=self.steps, max_seconds=seconds, seed=self.seed)

    @property
    def has_video(self) -> bool:
        """Whether frames are recorded."""
        return self.video is not None or self.video_dir is not None

    @property
    def has_frames(self) -> bool:
        """Whether the envs must render."""
        return self.frames or self.has_video

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
            show_progress=not self.quiet,
        )


def dispatch(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return the exit status.

    click's own `main` is not used, because it prints several lines on a Ctrl-C and on a wrong option.
    """
    try:
        with group.make_context("stepmill", arguments) as context:
            group.invoke(context)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.message)
        return ExitStatus.USAGE
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "stepmill"
        complain(f"{error.format_message()} See `{command} --help`.")
        return ExitStatus.USAGE
    return ExitStatus.DONE


@click.group(name="stepmill", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stepmill")
def group() -> None:
    """Runs many reinforcement-learning environments at once."""


for command in (top, trace, doctor, bench, tune):
    group.add_command(command)


@group.command(short_help="Show how fast an env runs, and where the time goes.")
@click.argument("env_id", metavar="ENV")
@click.option("--num-envs", type=COUNT, metavar="N", default=DEFAULT_NUM_ENVS, show_default=True, help="How many envs.")
@click.option(
    "--num-workers", type=COUNT, metavar="N", help="How many workers share them.  [default: one per usable core]"
)
@choice_option("--backend", BACKENDS, "auto", "Where envs run")
@click.option(
    "--batch-size", type=COUNT, metavar="N", help="Act on N envs at a time, those that are ready.  [default: all]"
)
@click.option("--steps", type=COUNT, metavar="N", help="Stop after N env-steps in total.")
@click.option(
    "--seconds",
    type=SECONDS,
    metavar="S",
    help=f"Stop after S seconds.  [default: {DEFAULT_SECONDS:.0f}, without --steps]",
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Seed of env 0, and of the actions; env i gets seed + i."
)
@click.option(
    "--policy", default=RANDOM, metavar="MODULE:FUNCTION", help="The policy that acts; see above.  [default: random]"
)
@click.option(
    "--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor, as a JSON object."
)
@choice_option("--context", CONTEXTS, Context.FORKSERVER.value, "How worker processes start")
@click.option("--step-timeout", type=SECONDS, metavar="S", help="Kill the worker of an env whose step takes longer.")
@click.option("--reset-timeout", type=SECONDS, metavar="S", help="Kill the worker of an env whose reset takes longer.")
@choice_option("--on-fault", POLICIES, OnFault.RAISE.value, "What happens when an env fails")
@click.option(
    "--crash-dir", type=click.Path(file_okay=False), metavar="DIR", help="Write a crash capsule for each fault."
)
@click.option("--atari/--no-atari", default=None, help="Standard Atari preprocessing.  [default: for ids of ale_py]")
@json_option("summary")
@click.option("--frames", is_flag=True, help="Show frames of the envs, as many as fit on the terminal.")
@click.option("--video", metavar="FILE", help="Write a video of all envs in a grid, one frame per step.")
@click.option(
    "--video-dir", type=click.Path(file_okay=False, exists=True), metavar="DIR", help="Write a video per env."
)
@click.option("--quiet", is_flag=True, help="Show nothing before the summary.")
@click.option("--traceback", is_flag=True, help="When an env, a worker or the policy fails, show the traceback.")
@click.pass_context
def run(context: click.Context, /, **_: object) -> None:
    """Drive ENV with random actions or with your policy, and show its speed and where the time goes.

    ENV is a Gymnasium id, such as CartPole-v1 or ALE/Pong-v5, or module:Id; the module is imported first.

    A policy is a function(obs, action_space) that returns one batch of actions. obs is the observation of the batch: arrays
    of shape [B, ...], in dicts and tuples where the env has them. action_space is Gymnasium's space of B actions at
    once, seeded with --seed. The returned actions have the shape of action_space.sample(): integers [B] for Discrete,
    floats [B, ...] for Box. B is --batch-size. The module of the policy is also searched in the current directory.

    Standard Atari preprocessing is: one frame in 4 (the env itself skips none), the maximum of the last two, grayscale,
    84x84, up to 30 no-ops after a reset, the last 4 frames stacked. It needs pip install 'stepmill[atari]'.

    On a terminal the run is shown live; otherwise a line is written every two seconds. Only steps of envs are counted, not
    resets. Exit status: 0 done, 1 an env, worker or policy failed, or an env did not answer, 2 the command cannot work as
    given, 130 Ctrl-C.
    """
    request = RunRequest(**context.params)
    try:
        run_env(request)
    except StepmillError:
        if request.traceback:
            traceback.print_exc()
        raise


@group.command(short_help="Replay the episode in which an env failed.")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option(
    "--env",
    "env",
    metavar="MODULE:FUNCTION",
    help="The function that makes the env, in place of the one that FILE names.",
)
@click.option("--trust", is_flag=True, help="Import the code that FILE names without asking.")
@click.option("--pdb", is_flag=True, help="If it fails again, open a debugger where it was raised.")
@click.option(
    "--in-process", is_flag=True, help="Replay in this process even an env that crashed or hung, for a native debugger."
)
@json_option("report")
def replay(**arguments: Any) -> None:
    """Replay the episode of a crash capsule, and report whether it fails again.

    FILE was written by a pool with crash_dir when an env failed. The replay uses the same seed, options and actions, up to
    the step that failed, and compares rewards, flags and observations with the recorded ones. An env that raised is
    replayed in this process; an env that crashed or hung is replayed in a separate process.

    FILE is data, but it names your code that makes the env. You are asked before that code is imported; if stdin is not a
    terminal, --trust is needed. The current directory is searched for modules.

    Exit status: 0 it failed again in the same way, at the same step; 1 it did not fail, or failed differently; 2 it could
    not be replayed: FILE is broken, not trusted, or its env cannot be made; 130 Ctrl-C.
    """
    from stepmill.observe.replay_command import ReplayRequest, replay_file

    status = replay_file(ReplayRequest(**arguments))
    if status:
        raise click.exceptions.Exit(status)


def run_env(request: RunRequest) -> None:
    """Find the env, build the pool, run it, and print the summary. After a Ctrl-C, print the summary and raise it again."""
    plan = request.plan()
    search_current_directory()
    rendering = {"render_mode": "rgb_array"} if request.has_frames else {}
    choice = find_env(request.env_id, atari=request.atari, env_kwargs={**rendering, **(request.env_kwargs or {})})
    with open_view(request, plan) as view:
        outcome = run_pool(request, plan, choice, view)
    summarise = summary_json if request.is_json else summary_text
    sys.stdout.write(f"{summarise(outcome.setup, outcome.totals, is_interrupted=outcome.is_interrupted)}\n")
    sys.stdout.flush()
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if outcome.silent:
        raise EnvTimeout(
            f"envs {outcome.silent} had not answered for {outcome.silence_s:.1f} s when the run ended; use --step-timeout "
            "and --reset-timeout to kill envs that hang",
            env_ids=outcome.silent,
            timeout_s=outcome.silence_s,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `silent` lists the envs that did not answer at the end, and `silence_s` says for how long."""

    setup: Setup
    totals: Snapshot
    is_interrupted: bool
    silent: list[int]
    silence_s: float


def run_pool(request: RunRequest, plan: RunPlan, choice: EnvChoice, view: View) -> Outcome:
    """Run the envs and show the run in the view."""
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
            backend=backend_of(pool),
            batch_size=plan.batch_size,
            policy=request.policy,
            seed=plan.seed,
            is_atari=choice.is_atari,
            start_s=start_s,
        )
        view.began(setup)
        if request.has_video:
            policy = after_frame(policy, partial(recorder.add, pool.render))
        if request.frames:
            live = cast("LiveView", view)  # open_view refuses --frames without a terminal
            policy = after_frame(policy, partial(live.sample_frames, pool.render))
        running = Run(pool, policy, batch_actions(pool.single_action_space, plan.batch_size, plan.seed), plan)
        is_interrupted = False
        try:
            for snapshot in running.snapshots(view.interval_s):
                view.show(snapshot)
        except KeyboardInterrupt:
            is_interrupted = True
        totals = running.finish()
        silent, silence_s = running.silent_envs()
        return Outcome(setup, totals, is_interrupted, silent, silence_s)


def after_frame(policy: Policy, record_frame: Callable[[], None]) -> Policy:
    """Return a policy that records a frame of all envs before it acts."""

    def act(obs: object, action_space: gymnasium.Space[object]) -> object:
        record_frame()
        return policy(obs, action_space)

    return act


def backend_of(pool: Pool) -> str:
    """Return the name of the backend that runs, also if the user asked for "auto"."""
    from stepmill.pool.start import choose_backend

    chosen = choose_backend(pool.num_envs, pool.options)
    return chosen.value if isinstance(chosen, BackendName) else type(chosen).__name__


@contextmanager
def open_view(request: RunRequest, plan: RunPlan) -> Iterator[View]:
    """Choose the view: live on a terminal, plain lines in a pipe, and nothing on stdout but the document with --json.

    Raises:
        UsageError: --frames is given, and there is no terminal that can show them.
    """
    if request.quiet:
        yield QuietView()
        return
    stream = sys.stderr if request.is_json else sys.stdout
    if request.frames:
        from rich.console import Console

        from stepmill.observe.frames import require_colours

        require_colours(Console(file=stream))
    if not stream.isatty():
        yield QuietView() if request.is_json else PlainView(stream)
        return
    from rich.console import Console

    from stepmill.observe.live import open_live_view

    console = Console(file=stream)
    if console.is_dumb_terminal:
        yield PlainView(stream)
        return
    with open_live_view(console, plan) as live:
        yield live
