"""The commands that look at envs and pools: top. cli.py turns the exceptions raised here into exit statuses."""

from __future__ import annotations

import sys

import click

from stepmill.observe.options import SECONDS


@click.command()
@click.argument("pid", metavar="[PID]", type=click.IntRange(min=1), required=False)
@click.option("--interval", type=SECONDS, metavar="S", default=1.0, show_default=True, help="Seconds between pictures.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N pictures.")
@click.option("--prometheus", is_flag=True, help="Print the counters once, in the text format of Prometheus.")
def top(pid: int | None, interval: float, count: int | None, prometheus: bool) -> None:
    """Show where a running program's pool spends its time, from another terminal.

    PID is the process that made the pool. Without it, the programs of this user that have pools are listed.

    The pool is only read: the program is not stopped and not slowed. If it has several pools, the oldest is shown.
    A worker that has been in one step or reset for more than 1.5 s is named with its env, and so is one that is stopped or
    dead. The program must use the same version of stepmill.

    Exit status: 0 done, 2 there is no such pool, 130 Ctrl-C.
    """
    from rich.console import Console

    from stepmill.observe.attach import AttachedPool, find_pools, only_pool
    from stepmill.observe.monitor import list_pools, watch_until_end

    if pid is None:
        pools = find_pools()
        if not pools:
            sys.stdout.write("no program of this user has a pool\n")
            return
        list_pools(pools, Console())
        return
    with AttachedPool(only_pool(pid)) as pool:
        if prometheus:
            sys.stdout.write(pool.stats().to_prometheus())
            return
        watch_until_end(pool, interval, num_looks=count)
