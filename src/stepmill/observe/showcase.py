"""`python -m stepmill.observe.showcase`: what `make run` ends with.

stepmill on CartPole and on Atari Pong under the live view, then a table: stepmill beside Gymnasium's vector envs, on this
machine, in this minute.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import parent_process
from typing import TYPE_CHECKING

from stepmill.observe.catalog import EnvChoice, find_env
from stepmill.observe.cli import ExitStatus, guard
from stepmill.observe.commands import RunRequest, run_env
from stepmill.observe.race import Racer, Rounds, race
from stepmill.observe.report import per_second
from stepmill.spec.errors import MissingExtraError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

BASELINE = "gymnasium AsyncVectorEnv"


@dataclass(frozen=True)
class Act:
    """One env of the show, how many of it, and how long the live view runs."""

    env_id: str
    num_envs: int
    seconds: float


ACTS = (Act("CartPole-v1", 64, 4.0), Act("ALE/Pong-v5", 8, 6.0))


def show(acts: Sequence[Act] = ACTS, rounds: Rounds = Rounds()) -> int:  # noqa: B008  (frozen)
    """Run every act live, then race every act, and print the table. Returns the exit status."""
    found = [(act, choice) for act in acts if (choice := _find(act)) is not None]
    for act, _ in found:
        _say(f"\n$ stepmill run {act.env_id} --num-envs {act.num_envs} --seconds {act.seconds:g}")
        run_env(_request(act))
    rates: dict[str, dict[str, float]] = {}
    for act, choice in found:
        _say(
            f"\nracing {act.num_envs} x {act.env_id}: {rounds.num_rounds} rounds of {rounds.round_s:g} s each, in turn ..."
        )
        rates[f"{act.env_id} x {act.num_envs}"] = race(racers(choice, act.num_envs), rounds)
    _say(f"\n{table(rates)}")
    return ExitStatus.DONE


def racers(choice: EnvChoice, num_envs: int) -> list[Racer]:
    """Gymnasium's vector envs and ours, each in its best configuration, over the same env."""
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    import stepmill

    makers = [partial(make_calmly, choice.make)] * num_envs
    return [
        Racer(BASELINE, partial(AsyncVectorEnv, makers, copy=False), _terminate),
        Racer("gymnasium SyncVectorEnv", partial(SyncVectorEnv, makers, copy=False), _close),
        Racer("stepmill serial", partial(stepmill.VectorEnv, makers, backend="serial"), _close),
        Racer("stepmill process", partial(stepmill.VectorEnv, makers, backend="process"), _close),
    ]


def make_calmly(make: Callable[[], gymnasium.Env[object, object]]) -> gymnasium.Env[object, object]:
    """Build an env for any engine: one thread for OpenCV, and in Gymnasium's workers no traceback at a Ctrl-C."""
    if parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if find_spec("cv2") is not None:
        import cv2

        cv2.setNumThreads(1)
    return make()


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


def _find(act: Act) -> EnvChoice | None:
    try:
        return find_env(act.env_id)
    except MissingExtraError as error:
        _say(f"{act.env_id} is left out: {error.message}")
        return None


def _request(act: Act) -> RunRequest:
    return RunRequest(
        env_id=act.env_id,
        num_envs=act.num_envs,
        num_workers=None,
        backend="process",
        batch_size=None,
        steps=None,
        seconds=act.seconds,
        seed=0,
        policy="random",
        atari=None,
        json=False,
        traceback=False,
    )


def _close(envs: VectorEnv) -> None:
    envs.close()


def _terminate(envs: VectorEnv) -> None:
    """Close Gymnasium's AsyncVectorEnv without asking: after a Ctrl-C its workers may be in the middle of a step."""
    envs.close(terminate=True)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(guard(show))
