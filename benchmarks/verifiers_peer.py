"""verifiers' env workers: processes with an event loop each, behind a broker, that play whole episodes (verifiers 0.4.0).

A program sends a task to the broker and awaits its episode. The worker runs a harness, which steps the env and calls the model; here
it calls none, and the env is stepped in the worker's own loop: no step leaves the process, which is the best case for verifiers.
As a module with the name `verifiers_peer`, this file is the plugin that its workers load.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, env_config_data, serve_env
from verifiers.v1.utils.loaders import resolve_env_config

from benchmarks.aio import Pausing, play

__all__ = ["InWorker", "Pauses"]


class Data(vf.TaskData):  # type: ignore[misc]
    """A task."""

    seed: int
    options: dict[str, int]


class Task(vf.Task[Data]):  # type: ignore[misc]
    """No more than its data."""


class Pauses(vf.Taskset[Task, vf.TasksetConfig]):  # type: ignore[misc]
    """The type of the tasks; the program sends them itself."""

    def load(self) -> list[Any]:
        """Return no tasks."""
        return []


class InWorker(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays an episode in the loop of the worker."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, *context: Any) -> vf.ProgramResult:
        """Play it."""
        data = context[-1]
        await play(Pausing(), data.options["num_steps"], "a", seed=data.seed, options=data.options)
        return vf.ProgramResult(0, "", "")


class Workers:
    """Episodes of env workers."""

    def __init__(self, client: EnvClient) -> None:
        self._client = client

    async def play(self, **task: Any) -> None:
        """Play an episode in a worker, as a trainer does."""
        task["prompt"] = "begin"
        episode = await self._client.run(vf.EvalClientConfig(), "no model", vf.SamplingConfig(), task)
        if not episode.ok:
            raise RuntimeError(f"verifiers: {episode.errors or episode.traces[0].errors}")


@asynccontextmanager
async def workers(num_workers: int) -> AsyncIterator[Workers]:
    """Start a fixed number of workers; each has played an episode when this returns."""
    sys.path.insert(0, str(Path(__file__).parent))
    config = resolve_env_config({"taskset": {"id": "verifiers_peer"}, "agent": {"runtime": {"type": "subprocess"}}})
    spawn = multiprocessing.get_context("spawn")
    address: Any = spawn.Queue()
    options = {"max_workers": num_workers, "elastic": False, "address": "tcp://127.0.0.1:0", "address_queue": address}
    server = spawn.Process(target=serve_env, kwargs={**options, "config_data": env_config_data(config)})
    server.start()
    client = EnvClient(await asyncio.to_thread(address.get, timeout=60))
    try:
        await client.wait_for_server_startup()
        started = Workers(client)
        await asyncio.gather(*(started.play(seed=seed, options={"num_steps": 1}) for seed in range(16 * num_workers)))
        yield started
    finally:
        await client.close()
        server.terminate()
        await asyncio.to_thread(server.join, 30)
