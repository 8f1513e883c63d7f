"""Run one env of `make test-envs`, and print one JSON object: `python -m tests.env_packages.run ID [API] [--steps N]`.

It has "unsteady", where two runs of the reference differ, "differs" for each backend, and "speed", in env-steps per second. The
reference is Gymnasium's SyncVectorEnv or, with an API, the envs played one after the other by tests/env_packages/plain.py.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np

import stepmill
from stepmill.observe.catalog import find_env
from stepmill.testing.compare import find_difference
from tests.env_packages import plain

NUM_ENVS = 4
BACKENDS = ("serial", "thread", "process")
SPEED_ENVS, SPEED_WORKERS, ROUNDS, ROUND_S = 8, 2, 3, 0.5
Make = Callable[[], Any]


def play_vector(envs: Any, actions: list[Any], ignored: str) -> list[Any]:
    """Return copies of all results of a Gymnasium vector env, with infos, but for the key `ignored`."""
    with closing(envs):
        results = [copy.deepcopy(envs.reset(seed=0)), *(copy.deepcopy(envs.step(action)) for action in actions)]
    for *_, info in results:
        info.pop(ignored, None)
    return results


def play_pool(make: Make, api: type[plain.Plain], actions: list[list[Any]], backend: str) -> list[Any]:
    """Return copies of the results of a pool, without infos."""
    options: Any = {"backend": backend} if backend == "serial" else {"backend": backend, "num_workers": 2}
    with stepmill.Pool([make] * len(actions), **options) as pool:
        batches = [copy_batch(pool.reset(seed=0 if api.is_seeded else None))]
        return [*batches, *(copy_batch(pool.step(plain.stack(list(rows)))) for rows in zip(*actions, strict=True))]


def copy_batch(batch: Any) -> Any:
    return copy.deepcopy((batch.obs, batch.reward, batch.terminated, batch.truncated))


def sync_class() -> Any:
    """Return Gymnasium's SyncVectorEnv, or MO-Gymnasium's for its envs: their rewards are vectors."""
    if "mo_gymnasium" in sys.modules:
        return import_module("mo_gymnasium.wrappers.vector").MOSyncVectorEnv
    return gymnasium.vector.SyncVectorEnv


def open_async(make: Make) -> tuple[Any, str]:
    """Return AsyncVectorEnv and its name; without shared memory where a space has no fixed size.

    For MO-Gymnasium return MOSyncVectorEnv: MOAsyncVectorEnv 1.3.2 does not start with Gymnasium 1.4.
    """
    if "mo_gymnasium" in sys.modules:
        return sync_class()([make] * SPEED_ENVS), "MOSyncVectorEnv"
    cls = gymnasium.vector.AsyncVectorEnv
    try:
        return cls([make] * SPEED_ENVS), "AsyncVectorEnv"
    except ValueError:
        return cls([make] * SPEED_ENVS, shared_memory=False), "AsyncVectorEnv, shared_memory=False"


def compare(make: Make, num_steps: int, ignored: str) -> dict[str, Any]:
    """Compare VectorEnv with SyncVectorEnv on each backend."""
    sync = sync_class()
    reference = sync([make] * NUM_ENVS)
    reference.action_space.seed(0)
    actions = [reference.action_space.sample() for _ in range(num_steps)]
    wanted = play_vector(reference, actions, ignored)
    unsteady = find_difference(wanted, play_vector(sync([make] * NUM_ENVS), actions, ignored))

    def run(backend: str) -> list[Any]:
        options: Any = {"backend": backend} if backend == "serial" else {"backend": backend, "num_workers": 2}
        return play_vector(stepmill.VectorEnv([make] * NUM_ENVS, **options), actions, ignored)

    return {"unsteady": shorten(unsteady), "differs": differences(wanted, run)}


def compare_plain(make: Make, api: type[plain.Plain], num_steps: int) -> dict[str, Any]:
    """Compare a Pool with the plain envs on each backend."""
    actions = draw(make, api, NUM_ENVS, num_steps)
    wanted = plain.play(api, make, actions)
    unsteady = find_difference(wanted, plain.play(api, make, actions))
    return {
        "unsteady": unsteady,
        "differs": differences(wanted, lambda backend: play_pool(make, api, actions, backend)),
    }


def draw(make: Make, api: type[plain.Plain], num_envs: int, num_steps: int) -> list[list[Any]]:
    env, rng = api(make()), np.random.default_rng(0)
    env.reset(0)
    return [[env.draw(rng) for _ in range(num_steps)] for _ in range(num_envs)]


def differences(wanted: list[Any], run: Callable[[str], list[Any]]) -> dict[str, str | None]:
    """Return where the results on each backend differ, or what was raised; None where they are equal."""
    found: dict[str, str | None] = {}
    for backend in BACKENDS:
        try:
            found[backend] = shorten(find_difference(wanted, run(backend), "step"))
        except Exception as error:  # it is a result
            found[backend] = shorten(f"{type(error).__name__}: {error}")
    return found


def shorten(text: str | None) -> str | None:
    return text and " ".join(text.split())[:200]


def measure(make: Make, api: type[plain.Plain] | None, num_steps: int) -> dict[str, Any]:
    """Return env-steps per second of stepmill and of its peer, medians of rounds in turn, and the peer's name."""
    options: Any = {"backend": "process", "num_workers": SPEED_WORKERS}
    if api is None:
        peer, name = open_async(make)
        ours: Any = stepmill.VectorEnv([make] * SPEED_ENVS, **options)
        peer.action_space.seed(0)
        batches = [peer.action_space.sample() for _ in range(num_steps)]
        peer.reset(seed=0)
        ours.reset(seed=0)
        steppers = [endless(ours.step, batches), endless(peer.step, batches)]
    else:
        ours, peer, name = stepmill.Pool([make] * SPEED_ENVS, **options), None, "loop"
        rows = list(zip(*draw(make, api, SPEED_ENVS, num_steps), strict=True))
        ours.reset(seed=0 if api.is_seeded else None)
        alone = [api(make()) for _ in range(SPEED_ENVS)]
        for seed, env in enumerate(alone):
            env.reset(seed)
        steppers = [
            endless(ours.step, [plain.stack(list(row)) for row in rows]),
            endless(lambda row: [env.step(action) for env, action in zip(alone, row, strict=True)], rows),
        ]
    rounds = [[rate(stepper) for stepper in steppers] for _ in range(ROUNDS + 1)][1:]
    ours.close()
    if peer is not None:
        peer.close()
    own, others = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    return {"stepmill": own, "peer": others, "name": name}


def endless(step: Callable[[Any], Any], batches: list[Any]) -> Iterator[Any]:
    while True:
        for batch in batches:
            yield step(batch)


def rate(stepper: Iterator[Any]) -> float:
    """Return env-steps per second of a round."""
    began_s, num_steps = time.perf_counter(), 0
    while time.perf_counter() - began_s < ROUND_S:
        next(stepper)
        num_steps += SPEED_ENVS
    return num_steps / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env_id")
    parser.add_argument("api", nargs="?")
    parser.add_argument("--steps", type=int, default=500, help="of each env")
    parser.add_argument("--ignore-info", default="", help="a key of infos that is not compared")
    given = parser.parse_args()
    api = getattr(plain, given.api) if given.api else None
    try:
        make = find_env(given.env_id).make
        make()
    except Exception as error:  # it is a result
        print(f"\n{json.dumps({'missing': f'{type(error).__name__}: {error}'})}")
        return
    try:  # first: AsyncVectorEnv forks this process, and no env has drawn anything in it yet
        speed = measure(make, api, given.steps)
    except Exception as error:  # it is a result
        speed = {"error": shorten(f"{type(error).__name__}: {error}")}
    ignored = given.ignore_info
    result = compare(make, given.steps, ignored) if api is None else compare_plain(make, api, given.steps)
    result["speed"] = speed
    print(f"\n{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
