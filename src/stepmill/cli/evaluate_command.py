"""The command `stepmill evaluate`, as click parses it. It imports other modules only when it runs."""

from __future__ import annotations

import re
from typing import Any

import click

from stepmill.cli.options import BACKEND, COUNT, Arguments, json_option, limit_option


def _seeds(text: str) -> range:
    """Return START:STOP, or a number of seeds from 0 on."""
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    seeds = range(int(found[1] or 0), int(found[2])) if found else range(0)
    if not seeds:
        raise click.BadParameter(f"{text!r} is neither START:STOP nor a number of seeds, such as 0:100 or 100.")
    return seeds


@click.command(short_help="Evaluate a policy: each task and seed once, in parallel.")
@click.argument("env_id", metavar="ENV")
@click.option("--policy", required=True, metavar="MODULE:FUNCTION", help="The policy; see above.")
@click.option("--seeds", type=_seeds, metavar="RANGE", default="0:100", show_default=True, help="START:STOP.")
@click.option("--tasks", type=Arguments(), metavar="JSON", help="For each task's name, an object of reset options.")
@click.option("--num-envs", type=COUNT, metavar="N", default=16, show_default=True, help="Episodes played at a time.")
@click.option("--num-workers", type=COUNT, metavar="N", help="The number of workers.  [default: one per usable core]")
@BACKEND
@click.option("--success", metavar="NAME", help="The info that says whether an episode was successful.")
@click.option("--retries", type=click.IntRange(min=0), default=2, show_default=True, help="Play again after a fault.")
@click.option("--resume", type=click.Path(dir_okay=False), metavar="FILE", help="Append episodes; skip those in it.")
@click.option("--videos", type=click.Path(file_okay=False), metavar="DIR", help="Write a video of each episode.")
@click.option("--record", metavar="WHICH", default="all", show_default=True, help="Videos: all, failures, or a number.")
@limit_option("step", "Time limit of a step.")
@limit_option("reset", "Time limit of a reset.")
@click.option("--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor.")
@json_option("result")
@click.option("--quiet", is_flag=True, help="Do not show progress.")
def evaluate(
    *, env_id: str, is_json: bool, quiet: bool, record: str, env_kwargs: dict[str, object] | None, **given: Any
) -> None:
    """Play each seed of each task exactly once in ENV with a policy, and print returns and success rates with intervals.

    ENV has the same form as for `stepmill run`. The policy is a function(obs) that returns the actions of one batch, a function(obs,
    episode_ids, is_first), or any other policy that `stepmill.evaluate` takes; its module is also searched in the current
    directory.

    Exit status: 0 all episodes were played, 1 some could not be, 2 the command cannot work as given, 130 Ctrl-C.
    """
    from stepmill.evaluation.evaluate import evaluate as play
    from stepmill.observe.catalog import find_env, load_object

    policy = load_object("--policy", given.pop("policy"))
    rendering = {} if given["videos"] is None else {"render_mode": "rgb_array"}
    env = find_env(env_id, env_kwargs={**rendering, **(env_kwargs or {})}).make
    found = play(policy, env, record=int(record) if record.isdigit() else record, progress=not quiet, **given)  # type: ignore[arg-type]
    click.echo(found.to_json() if is_json else found)
    if found.summary.num_failed:
        raise click.exceptions.Exit(1)
