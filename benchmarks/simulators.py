"""Measures simulators of another Python: `python -m benchmarks.simulators [--python COMMAND] [--websocket]`.

A step of an env that does nothing, and of one that returns 84x84x4 pictures after 1 ms of work, in this process, in another interpreter
(`stepmill.foreign`), and, with `--websocket`, behind a WebSocket with msgpack as in programs that serve simulators (needs `websockets` and
`msgpack`). Kinds take turns, and the best round of each counts, because other programs disturb a round.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import stepmill
from benchmarks.paths import ROOT
from tests.harness import simulator_envs

ENVS = Path(simulator_envs.__file__)
ROUNDS = 20
CASES = {"nothing": ("Nothing", {}, 500), "84x84x4, 1 ms": ("Image", {"busy_s": 1e-3}, 100)}


def _encode(value: Any) -> Any:
    return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}


def serve(name: str, kwargs: dict[str, Any], port: Any) -> None:
    """Serve an env by WebSocket and msgpack."""
    import msgpack
    from websockets.asyncio.server import serve as serve_socket

    env = getattr(simulator_envs, name)(**kwargs)

    async def handle(socket: Any) -> None:
        async for message in socket:
            obs, reward, terminated, truncated, info = env.step(msgpack.unpackb(message)["action"])
            await socket.send(
                msgpack.packb({"obs": _encode(obs), "reward": reward, "end": [terminated, truncated], "info": info})
            )

    async def run() -> None:
        async with serve_socket(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
            port.send(next(iter(server.sockets)).getsockname()[1])
            await asyncio.Future()

    asyncio.run(run())


def connect(name: str, kwargs: dict[str, Any]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a function that steps a served env, and one that ends the server."""
    import msgpack
    from websockets.sync.client import connect as connect_socket

    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(name, kwargs, theirs), daemon=True)
    server.start()
    socket = connect_socket(f"ws://127.0.0.1:{ours.recv()}", compression=None, max_size=None)

    def step() -> object:
        socket.send(msgpack.packb({"action": 1}))
        answer = msgpack.unpackb(socket.recv())
        obs = answer["obs"]
        return np.frombuffer(obs["data"], obs["dtype"]).reshape(obs["shape"])

    return step, server.terminate


def time_of(step: Callable[[], object], num_steps: int) -> float:
    """Return how many seconds a step takes."""
    begin = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - begin) / num_steps


def measure(command: list[str], *, has_websocket: bool) -> None:
    """Print one line per case and kind."""
    action = np.int64(1)
    for case, (name, kwargs, num_steps) in CASES.items():
        here = getattr(simulator_envs, name)(**kwargs)
        there = stepmill.foreign(f"{ENVS}:{name}", python=command, **kwargs)()
        here.reset()
        there.reset()
        kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "in this process": (lambda env=here: env.step(action), lambda: None),  # type: ignore[misc]
            "stepmill.foreign": (lambda env=there: env.step(action), there.close),  # type: ignore[misc]
        }
        if has_websocket:
            kinds["WebSocket, msgpack"] = connect(name, kwargs)
        best = dict.fromkeys(kinds, float("inf"))
        for _ in range(ROUNDS):
            best = {kind: min(best[kind], time_of(step, num_steps)) for kind, (step, _) in kinds.items()}
        for kind, (_, close) in kinds.items():
            close()
            share = best["in this process"] / best[kind]
            print(f"{case:15} {kind:20} {1 / best[kind]:10,.0f} steps/s   {share:7.1%} of in this process")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the other interpreter, as a command")
    parser.add_argument("--websocket", action="store_true", help="also measure a WebSocket with msgpack")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    measure(shlex.split(given.python), has_websocket=given.websocket)
