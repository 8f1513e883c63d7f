"""`python -m stepmill.observe.demo`: the last step of `make run`.

It runs stepmill on CartPole and on Atari Pong under the live view, then measures stepmill and Gymnasium's vector envs on the
same envs and prints a table of their speeds.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import parent_process
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from stepmill.observe.catalog import EnvChoice, find_env
from stepmill.observe.cli import ExitStatus, guard
from stepmill.observe.commands import RunRequest, run_env
from stepmill.observe.report import per_second
from stepmill.spec.errors import MissingExtraError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

BASELINE = "gymnasium AsyncVectorEnv"
NUM_DRAWS = 64
WARM_UP_S = 0.1


@dataclass(frozen=True)
class DemoEnv:
    """One env of the demo, how many copies of it to run, and how long the live view runs."""

    env_id: str
    num_envs: int
    seconds: float


@dataclass(frozen=True)
class Engine:
    """A vector env to measure: its name, how to open it, and how to close it even while a step is running."""

    name: str
    open: Callable[[], VectorEnv]
    close: Callable[[VectorEnv], None]


@dataclass(frozen=True)
class Rounds:
    """How many rounds to measure per engine, and how long each takes. A short warm-up comes first and is not counted."""

    num_rounds: int = 4
    round_s: float = 0.6


DEMO_ENVS = (DemoEnv("CartPole-v1", 64, 4.0), DemoEnv("ALE/Pong-v5", 8, 6.0))


def run_demo(demo_envs: Sequence[DemoEnv] = DEMO_ENVS, rounds: Rounds = Rounds()) -> int:
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


def engines_for(choice: EnvChoice, num_envs: int) -> list[Engine]:
    """Return Gymnasium's vector envs and stepmill's, each in its best configuration, over the same env."""
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    import stepmill

    env_fns = [partial(make_env, choice.make)] * num_envs
    return [
        Engine(BASELINE, partial(AsyncVectorEnv, env_fns, copy=False), _terminate),
        Engine("gymnasium SyncVectorEnv", partial(SyncVectorEnv, env_fns, copy=False), _close),
        Engine("stepmill serial", partial(stepmill.VectorEnv, env_fns, backend="serial"), _close),
        Engine("stepmill process", partial(stepmill.VectorEnv, env_fns, backend="process"), _close),
    ]


def make_env(make: Callable[[], gymnasium.Env[object, object]]) -> gymnasium.Env[object, object]:
    """Build an env for any engine. OpenCV gets one thread; Gymnasium's workers ignore Ctrl-C and print no traceback."""
    if parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if find_spec("cv2") is not None:
        import cv2

        cv2.setNumThreads(1)
    return make()


def compare_engines(engines: Sequence[Engine], rounds: Rounds) -> dict[str, float]:
    """Return each engine's median rate over the rounds, in env-steps/s.

    All engines are open at the same time and take turns in short rounds, so that a disturbance affects all of them alike.
    Every row that `step` returns is counted, including automatic resets, because the vector envs do not tell them apart.
    """
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    with ExitStack() as opened:
        running = {}
        for engine in engines:
            envs = engine.open()
            opened.callback(engine.close, envs)
            running[engine.name] = (envs, _draw_actions(envs))
            envs.reset(seed=0)
        for envs, actions in running.values():
            _run_round(envs, actions, WARM_UP_S)
        for _ in range(rounds.num_rounds):
            for name, (envs, actions) in running.items():
                rates[name].append(_run_round(envs, actions, rounds.round_s))
    return {name: median(each) for name, each in rates.items()}


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


def _draw_actions(envs: VectorEnv) -> list[object]:
    """Draw the actions before the measurement, so that it does not include sampling."""
    envs.action_space.seed(0)
    return [envs.action_space.sample() for _ in range(NUM_DRAWS)]


def _run_round(envs: VectorEnv, actions: list[object], round_s: float) -> float:
    """Step for about `round_s` seconds, read a few elements of each result, and return env-steps/s."""
    num_batches = 0
    begun_s = perf_counter()
    elapsed_s = 0.0
    while elapsed_s < round_s:
        obs, reward, *_ = envs.step(actions[num_batches % NUM_DRAWS])
        _ = obs[0].flat[0], reward[0]
        num_batches += 1
        elapsed_s = perf_counter() - begun_s
    return num_batches * envs.num_envs / elapsed_s


def _close(envs: VectorEnv) -> None:
    envs.close()


def _terminate(envs: VectorEnv) -> None:
    """Close Gymnasium's AsyncVectorEnv by force: after a Ctrl-C its workers may be in the middle of a step."""
    envs.close(terminate=True)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(guard(run_demo))
