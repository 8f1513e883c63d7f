"""A manager like ML-Agents': a process per env, a pipe each for actions, and one queue for all pickled results, which it polls."""

from __future__ import annotations

import multiprocessing
import queue
from typing import Any

from benchmarks.adapters.base import Adapter
from benchmarks.unity import BEHAVIOR, NoopPolicy


def _serve(worker_id: int, pipe: Any, results: Any, make: Any) -> None:
    env = make()
    env.reset()
    results.put((worker_id, {name: env.get_steps(name) for name in env.behavior_specs}))
    while (actions := pipe.recv()) is not None:
        for name, info in actions.items():
            env.set_actions(name, info.env_action)
        env.step()
        results.put((worker_id, {name: env.get_steps(name) for name in env.behavior_specs}))
    results.cancel_join_thread()


class Engine(Adapter):
    """Returns as soon as one worker has answered, with all answers received so far."""

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.results: Any = context.Queue()
        self.policy = NoopPolicy()
        self.pipes, self.processes = [], []
        for worker_id, make in enumerate(self.job.env_fns):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(worker_id, theirs, self.results, make), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.answered = [self.results.get() for _ in self.pipes]

    def advance(self) -> int:
        for worker_id, steps in self.answered:
            info = self.policy.get_action(steps[BEHAVIOR][0], worker_id)
            self.pipes[worker_id].send({BEHAVIOR: info})
        self.answered = []
        while not self.answered:
            self._poll()
        self.answered[0][1][BEHAVIOR][0].obs[0].item(0)
        return len(self.answered)

    def _poll(self) -> None:
        try:
            while True:
                self.answered.append(self.results.get_nowait())
        except queue.Empty:
            pass

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(5.0)
            process.kill()
        self.results.cancel_join_thread()
