"""MultiEnv with a thread and a pipe for each env: the engine that `stepmill.frontends.multi_env` replaces.

N forked processes serve their env over a pipe; N threads each write a pickled action to theirs and wait for the pickled
answer. An env whose episode has ended is reset before its next step.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.adapters.base import Adapter
from benchmarks.envs import EnvFn

_STEP, _RESET, _CLOSE = range(3)


def _serve(pipe: Connection, env_fn: EnvFn) -> None:
    env = env_fn()
    while True:
        command, value = pipe.recv()
        if command == _CLOSE:
            env.close()
            return
        pipe.send(env.step(value) if command == _STEP else env.reset())


class _Remote:
    """One env behind its pipe."""

    def __init__(self, env_fn: EnvFn) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, env_fn), daemon=True)
        self.process.start()
        theirs.close()
        self.is_over = False

    def ask(self, command: int, value: Any = None) -> Any:
        self.pipe.send((command, value))
        return self.pipe.recv()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        if self.is_over:
            self.ask(_RESET)
        obs, reward, terminated, truncated, info = self.ask(_STEP, action)
        self.is_over = terminated or truncated
        return obs, reward, self.is_over, info

    def close(self) -> None:
        self.pipe.send((_CLOSE, None))
        self.process.join()


class Engine(Adapter):
    """A thread pool maps the actions over the envs."""

    def start(self) -> None:
        self.remotes = [_Remote(env_fn) for env_fn in self.job.env_fns]
        self.threads = ThreadPoolExecutor(self.num_envs)
        list(self.threads.map(lambda remote: remote.ask(_RESET), self.remotes))

    def advance(self) -> int:
        results = self.threads.map(_Remote.step, self.remotes, self.next_actions())
        observations, rewards, _, _ = map(list, zip(*results, strict=True))
        observations[0].item(0)
        float(rewards[-1])
        return self.num_envs

    def close(self) -> None:
        self.threads.shutdown()
        for remote in self.remotes:
            remote.close()
