"""The commands of the command line, as click parses them. main.py turns the exceptions raised here into exit statuses.

A command imports other modules only when it runs: help, and errors about options, do not load NumPy.
"""

from __future__ import annotations

import traceback
from typing import Any

import click

from stepmill._version import __version__
from stepmill.cli.evaluate_command import evaluate
from stepmill.cli.inspection_commands import bench, doctor, top, trace, tune
from stepmill.cli.options import BACKEND, COUNT, SECONDS, Arguments, choice_option, json_option, limit_option
from stepmill.observe.exit_status import ExitStatus, complain
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import Context, OnFault

CONTEXTS = tuple(context.value for context in Context)
POLICIES = tuple(policy.value for policy in OnFault)


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


for command in (evaluate, top, trace, doctor, bench, tune):
    group.add_command(command)


@group.command(short_help="Show how fast an env runs, and where the time goes.")
@click.argument("env_id", metavar="ENV")
@click.option("--num-envs", type=COUNT, metavar="N", default=8, show_default=True, help="The number of envs.")
@click.option("--num-workers", type=COUNT, metavar="N", help="The number of workers.  [default: one per usable core]")
@BACKEND
@click.option(
    "--batch-size", type=COUNT, metavar="N", help="Act on N envs at a time, as they become ready.  [default: all]"
)
@click.option("--steps", type=COUNT, metavar="N", help="Stop after N env-steps in total.")
@click.option("--seconds", type=SECONDS, metavar="S", help="Stop after S seconds.  [default: 10, without --steps]")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Seed of env 0, and of the actions; env i gets seed + i."
)
@click.option(
    "--policy", default="random", metavar="MODULE:FUNCTION", help="The policy that acts; see above.  [default: random]"
)
@click.option(
    "--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor, as a JSON object."
)
@choice_option("--context", CONTEXTS, Context.FORKSERVER.value, "How worker processes start")
@limit_option("step", "Kill the worker of an env whose step takes longer.")
@limit_option("reset", "Kill the worker of an env whose reset takes longer.")
@choice_option("--on-fault", POLICIES, OnFault.RAISE.value, "What happens when an env fails")
@click.option(
    "--crash-dir", type=click.Path(file_okay=False), metavar="DIR", help="Write a crash capsule for each fault."
)
@click.option("--atari/--no-atari", default=None, help="Standard Atari preprocessing.  [default: for ids of ale_py]")
@json_option("summary")
@click.option("--video", metavar="FILE", help="Write a video of all envs in a grid, one frame per step.")
@click.option(
    "--video-dir", type=click.Path(file_okay=False, exists=True), metavar="DIR", help="Write one video per env."
)
@click.option("--quiet", is_flag=True, help="Show nothing before the summary.")
@click.option("--traceback", is_flag=True, help="When an env, a worker or the policy fails, show the traceback.")
@click.pass_context
def run(context: click.Context, /, **_: object) -> None:
    """Step ENV with random actions or with your policy, and show its speed and where the time goes.

    ENV is a Gymnasium id, such as CartPole-v1 or ALE/Pong-v5; or module:Id, for which the module is imported first; or
    module:Class, a class or function of a module that makes envs.

    A policy is a function(obs, action_space) that returns one batch of actions. obs is the observation of the batch: arrays
    of shape [B, ...], in dicts and tuples where the env has them. action_space is Gymnasium's space of B actions at
    once, seeded with --seed. The returned actions have the shape of action_space.sample(): integers [B] for Discrete,
    floats [B, ...] for Box. B is --batch-size. The module of the policy is also searched in the current directory.

    Standard Atari preprocessing is as follows: one frame in 4 (the env itself skips none), the maximum of the last two frames,
    grayscale, 84x84, up to 30 no-ops after a reset, and the last 4 frames stacked. It needs pip install 'stepmill[atari]'.

    On a terminal the run is shown live; otherwise a line is written every two seconds. Only steps of envs are counted, not
    resets. Exit status: 0 done; 1 an env, worker or policy failed, or an env did not answer; 2 the command cannot work as
    given; 130 Ctrl-C.
    """
    from stepmill.observe.run_command import RunRequest, run_env

    request = RunRequest.of(context.params)
    try:
        run_env(request)
    except StepmillError:
        if request.traceback:
            traceback.print_exc()
        raise


@group.command(short_help="Replay the episode in which an env failed.")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option(
    "--env", "env", metavar="MODULE:FUNCTION", help="The function that makes the env, in place of the one in FILE."
)
@click.option("--trust", is_flag=True, help="Load what is pickled in FILE without asking.")
@click.option("--pdb", "has_pdb", is_flag=True, help="If the env raises again, open a debugger at that place.")
@click.option(
    "--in-process", is_flag=True, help="Replay in this process even an env that crashed or hung, for a native debugger."
)
@json_option("report")
def replay(**arguments: Any) -> None:
    """Replay the episode of a crash capsule, and report whether it fails again.

    FILE was written by a pool with crash_dir when an env failed. The replay uses the same seed, options and actions, up to
    the step that failed, and compares rewards, flags and observations with the recorded ones. An env that raised is
    replayed in this process; an env that crashed or hung is replayed in a separate process.

    FILE is data, but the function that makes the env is pickled in it, and loading a pickle can run any code. You are asked
    before it is loaded; if stdin is not a terminal, --trust is needed. The current directory is searched for modules.

    Exit status: 0 it failed again in the same way, at the same step; 1 it did not fail, or failed differently; 2 it could
    not be replayed: FILE is broken, not trusted, or its env cannot be made; 130 Ctrl-C.
    """
    from stepmill.observe.replay_command import replay_file

    status = replay_file(**arguments)
    if status:
        raise click.exceptions.Exit(status)
