"""Two plain Python loops, each pinned to a core and with half of the envs: the upper bound for Python envs on two cores."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

from benchmarks.adapters.bare import Engine as Bare
from benchmarks.adapters.base import Adapter, Job, Round

NUM_LOOPS = 2
ANSWER_S = 120.0


class _Half(Bare):
    """The loop of one core, with its share of the envs."""

    def __init__(self, job: Job, index: int) -> None:
        super().__init__(job)
        share = job.num_envs // NUM_LOOPS
        self._mine = slice(index * share, (index + 1) * share)
        self.num_envs = share
        self.actions = [actions[self._mine] for actions in self.actions]

    def start(self) -> None:
        self.envs = [make() for make in self.job.env_fns[self._mine]]
        for index, env in enumerate(self.envs):
            env.reset(seed=self._mine.start + index)


def _loop(job: Job, index: int, core: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    half = _Half(job, index)
    half.start()
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        pipe.send(half.run(seconds))


class Engine(Adapter):
    """Starts both loops of a round together and adds up their steps."""

    def start(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._loops = []
        for index in range(NUM_LOOPS):
            ours, theirs = context.Pipe()
            loop = context.Process(target=_loop, args=(self.job, index, cores[index % len(cores)], theirs), daemon=True)
            loop.start()
            self._pipes.append(ours)
            self._loops.append(loop)
        self._answers()

    def run(self, seconds: float) -> Round:
        for pipe in self._pipes:
            pipe.send(seconds)
        halves: list[Round] = self._answers()
        rate = sum(half.steps / half.wall_s for half in halves)
        wall_s = max(half.wall_s for half in halves)
        times = [half.env_s / half.wall_s for half in halves if half.env_s is not None]
        return Round(rate * wall_s, wall_s, sum(times) * wall_s if times else None)

    def advance(self) -> int:
        raise NotImplementedError("the two loops run by themselves")

    def close(self) -> None:
        for pipe, loop in zip(self._pipes, self._loops, strict=True):
            pipe.send(None)
            loop.join(5)

    def _answers(self) -> list[Round]:
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_S):
                raise TimeoutError("a loop of the ceiling does not answer")
        return [pipe.recv() for pipe in self._pipes]
