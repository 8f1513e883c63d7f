"""`python -m stepmill.observe.demo`: the last step of `make run`.

It runs stepmill on CartPole and on Atari Pong under the live view, then measures stepmill and Gymnasium's vector envs on the
same envs and prints a table of their speeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from stepmill.observe.catalog import EnvChoice, find_env
from stepmill.observe.cli import guard
from stepmill.observe.compare import BASELINE, Rounds, compare_engines, engines_for
from stepmill.observe.exit_status import ExitStatus
from stepmill.observe.report import per_second
from stepmill.observe.run_command import RunRequest, run_env
from stepmill.spec.errors import MissingExtraError


@dataclass(frozen=True)
class DemoEnv:
    """One env of the demo, how many copies of it to run, and how long the live view runs."""

    env_id: str
    num_envs: int
    seconds: float


ROUNDS = Rounds(num_rounds=3, round_s=0.4)
DEMO_ENVS = (DemoEnv("CartPole-v1", 64, 3.0), DemoEnv("ALE/Pong-v5", 8, 4.0))


def run_demo(demo_envs: Sequence[DemoEnv] = DEMO_ENVS, rounds: Rounds = ROUNDS) -> int:
    """Run every env live, then compare the engines on every env, and print the table. Returns the exit status."""
    found = [(env, choice) for env in demo_envs if (choice := _find(env)) is not None]
    for env, _ in found:
        _print_line(f"\n$ stepmill run {env.env_id} --num-envs {env.num_envs} --seconds {env.seconds:g}")
        run_env(_request(env))
    rates: dict[str, dict[str, float]] = {}
    for env, choice in found:
        _print_line(
            f"\ncomparing engines on {env.num_envs} x {env.env_id}: {rounds.num_rounds} rounds of {rounds.round_s:g} s "
            "for each, in turn ..."
        )
        rates[f"{env.env_id} x {env.num_envs}"] = compare_engines(engines_for(choice, env.num_envs), rounds)
    _print_line(f"\n{table(rates)}")
    return ExitStatus.DONE


def table(rates: dict[str, dict[str, float]]) -> str:
    """Lay out the rates, one column per env, each with its ratio to Gymnasium's AsyncVectorEnv."""
    engines = list(next(iter(rates.values()), {}))
    rows = [["env-steps/s", *rates]]
    for engine in engines:
        cells = [f"{per_second(each[engine])}  {each[engine] / each[BASELINE]:5.1f}x" for each in rates.values()]
        rows.append([engine, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _find(env: DemoEnv) -> EnvChoice | None:
    try:
        return find_env(env.env_id)
    except MissingExtraError as error:
        _print_line(f"{env.env_id} is left out: {error.message}")
        return None


def _request(env: DemoEnv) -> RunRequest:
    return RunRequest(
        env_id=env.env_id,
        num_envs=env.num_envs,
        num_workers=None,
        backend="process",
        batch_size=None,
        steps=None,
        seconds=env.seconds,
        seed=0,
        policy="random",
        atari=None,
        is_json=False,
        traceback=False,
    )


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(guard(run_demo))
