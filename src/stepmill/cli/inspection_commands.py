"""The commands that look at envs and pools: top, trace, doctor, bench, tune. main.py turns the exceptions raised here into exit statuses."""

from __future__ import annotations

import sys
from typing import Any

import click

from stepmill.cli.options import BACKEND, COUNT, SECONDS, Arguments, Finite, json_option
from stepmill.observe.exit_status import ExitStatus
from stepmill.spec.errors import UsageError


@click.command(short_help="Show where the pool of a running program spends its time.")
@click.argument("pid", metavar="[PID]", type=click.IntRange(min=1), required=False)
@click.option("--interval", type=SECONDS, metavar="S", default=1.0, show_default=True, help="Seconds between updates.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N updates.")
@click.option("--prometheus", is_flag=True, help="Print the counters once, in the text format of Prometheus.")
def top(pid: int | None, interval: float, count: int | None, prometheus: bool) -> None:
    """Show where a running program's pool spends its time, from another terminal.

    PID is the process that made the pool. Without it, the programs of this user that have pools are listed; with --prometheus the
    counters are printed if there is only one such program.

    The pool is only read: the program is neither stopped nor slowed. If it has several pools, the oldest is shown.
    A worker that has been in one step or reset for more than 1.5 s, or that is stopped or dead, is named with its env. The
    program must use the same version of stepmill.

    Exit status: 0 done; 2 there is no such pool; 130 Ctrl-C.
    """
    from rich.console import Console

    from stepmill.observe.attach import AttachedPool, find_pools, only_pool
    from stepmill.observe.monitor import list_pools, watch_until_end

    if pid is None:
        pools = find_pools()
        pids = sorted({pool.pid for pool in pools})
        if prometheus and len(pids) != 1:
            found = f"these have pools: {', '.join(map(str, pids))}" if pids else "no program of this user has a pool"
            raise UsageError(f"--prometheus prints the counters of one program; give its PID ({found})")
        if not prometheus and not pools:
            sys.stdout.write("no program of this user has a pool\n")
            return
        if not prometheus:
            list_pools(pools, Console())
            return
        pid = pids[0]
    with AttachedPool(only_pool(pid)) as pool:
        if prometheus:
            sys.stdout.write(pool.stats().to_prometheus())
            return
        watch_until_end(pool, interval, num_looks=count)


@click.command(short_help="Record what each worker does, for ui.perfetto.dev.")
@click.argument("env_id", metavar="ENV")
@click.option("-o", "--output", metavar="FILE", default="trace.json", show_default=True, help="The file of the trace.")
@click.option("--num-envs", type=COUNT, metavar="N", default=8, show_default=True, help="The number of envs.")
@click.option("--num-workers", type=COUNT, metavar="N", help="The number of workers.  [default: one per usable core]")
@BACKEND
@click.option("--batch-size", type=COUNT, metavar="N", help="Act on N envs at a time, as they become ready.")
@click.option("--seconds", type=SECONDS, metavar="S", default=0.5, show_default=True, help="Seconds to record.")
@click.option("--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
def trace(**arguments: Any) -> None:
    """Step ENV with random actions, and record what each thread does, for ui.perfetto.dev.

    ENV is a Gymnasium id, module:Id, or module:Class. The trace has a track for the learner and one per worker, with steps, resets and
    waits, and arrows from the send of a command to the env's step and to the recv of its result. Nothing is uploaded: open
    https://ui.perfetto.dev and drop the file on it.

    The first 0.2 s, in which processes warm up, are not recorded.
    """
    from stepmill.observe.run_command import trace_env

    trace_env(**arguments)


@click.command(short_help="Check an env for problems with speed, data and stability.")
@click.argument("env_id", metavar="ENV")
@click.option(
    "--steps", type=COUNT, metavar="N", default=10_000, show_default=True, help="Number of steps for finding leaks."
)
@click.option("--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor.")
@click.option("--atari/--no-atari", default=None, help="Standard Atari preprocessing.  [default: for ids of ale_py]")
@json_option("diagnosis")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def doctor(
    env_id: str, steps: int, env_kwargs: dict[str, object] | None, *, atari: bool | None, is_json: bool, quiet: bool
) -> None:
    """Check ENV for problems that make it slow, wrong or fragile in a pool, and say what to do.

    ENV is a Gymnasium id, module:Id, or module:Class. The checks run in separate processes, so that an env that crashes or hangs is a
    finding, too. They find results outside the spaces, observations that change later, generators and state that envs share, data
    that depend on more than the seed, infos that are huge or cannot be pickled, slow resets, threads, leaks of memory and
    descriptors, processes that are still running after close(), and differences between the backends.

    Exit status: 0 no findings, or only notes; 1 there are findings; 2 the env cannot be checked; 130 Ctrl-C.
    """
    from stepmill.observe.catalog import find_env, search_current_directory
    from stepmill.observe.doctor import run_doctor

    search_current_directory()
    choice = find_env(env_id, atari=atari, env_kwargs=env_kwargs)
    diagnosis = run_doctor(choice.env_id, choice.make, steps, is_json=is_json, is_quiet=quiet)
    if any(finding.check == "not-checked" for finding in diagnosis.findings):
        raise click.exceptions.Exit(ExitStatus.USAGE)
    if not diagnosis.is_healthy:
        raise click.exceptions.Exit(ExitStatus.FAILED)


@click.command(short_help="Compare the speed with that of Gymnasium's vector envs.")
@click.argument("env_id", metavar="ENV")
@click.option("--num-envs", type=COUNT, metavar="N", default=8, show_default=True, help="The number of envs.")
@click.option("--rounds", type=COUNT, metavar="N", default=4, show_default=True, help="Rounds of each engine.")
@click.option("--round-seconds", type=SECONDS, metavar="S", default=0.5, show_default=True, help="Length of a round.")
@click.option("--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor.")
@json_option("rates")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def bench(**arguments: Any) -> None:
    """Compare the speed of stepmill with that of Gymnasium's vector envs on ENV.

    All engines are open at the same time and take turns in short rounds, so that a busy machine affects all alike. The rates
    are medians over the rounds, with random actions that are drawn in advance. stepmill has its defaults, Gymnasium copy=False.
    """
    from stepmill.observe.compare import run_bench

    run_bench(**arguments)


@click.command(short_help="Find how to run an env on this machine.")
@click.argument("env", metavar="ENV")
@click.option("--num-envs", type=COUNT, metavar="N", default=8, show_default=True, help="The number of envs.")
@click.option(
    "--seconds",
    "--budget-s",
    "budget_s",
    type=SECONDS,
    metavar="S",
    default=60.0,
    show_default=True,
    help="Seconds that the search may take.",
)
@click.option(
    "--async/--no-async",
    "is_async",
    default=None,
    help="Try batches of the envs that are ready, or steps of all envs.  [default: both]",
)
@click.option(
    "--learner-ms",
    type=Finite(min=0),
    metavar="MS",
    default=0.3,
    show_default=True,
    help="Milliseconds that your program computes per batch.",
)
@click.option(
    "--step-timeout",
    "step_timeout_s",
    type=SECONDS,
    metavar="S",
    default=30.0,
    show_default=True,
    help="Time limit of a step and of a reset.",
)
@click.option("--env-kwargs", type=Arguments(), metavar="JSON", help="Arguments of the env's constructor.")
@click.option("--atari/--no-atari", default=None, help="Standard Atari preprocessing.  [default: for ids of ale_py]")
@json_option("result")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def tune(**arguments: Any) -> None:
    """Find how to run ENV on this machine, and print the line of Python that does it.

    ENV is a Gymnasium id, module:Id, or module:Class. The backends take turns in stepping it with random actions, so that a busy machine
    affects all alike, and after six rounds those that are clearly slower than the best are dropped. Then configurations that differ
    from the best by one option are compared in the same way, until none is faster. Of equally fast configurations (within 5 %) the simplest is chosen: serial
    before thread before process, and fewer workers. Batches of some envs are chosen if they are 15 % faster.

    Gains are relative to backend="auto". A learner computes between two batches, for 0.3 ms unless --learner-ms is given, which
    is typical of a small policy. If the learner takes longer, a faster engine gains less.

    Exit status: 0 done; 1 the env failed; 2 the command cannot work as given; 130 Ctrl-C, after the results so far are printed.
    """
    from stepmill.observe.tune import run_tune

    run_tune(**arguments)
