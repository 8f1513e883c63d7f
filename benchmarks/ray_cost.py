"""Fits the cost model of docs/scaling.md: the time of a step, and the processor time of the program, as functions of nodes and envs.

    y = a + b · k + c · k · n        k nodes, n envs per node

`a` is paid per step, `b` per node and step, `c` per env-step. The wall time contains the steps of the envs; the processor time of the
program does not, and so can be measured on a machine whose cores the nodes share.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import stepmill
from stepmill.backends.ray.messages import Answer
from stepmill.backends.ray.node_link import NodeLink
from stepmill.backends.ray.stream import Bytes
from stepmill.pool.port import PoolPort

NODE_COUNTS = (1, 2, 4)
ENVS_PER_NODE = (16, 128, 512)
LATENCY_NODES, LATENCY_ENVS = 2, 128  # the point that is measured again with added latency
LARGE_NODES, LARGE_ENVS = 100, 1000  # what the model is asked for: nodes, envs per node
WARM_UP = 5

EnvFn = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """What was measured with `nodes` nodes of `envs` envs, per step of all envs: seconds, messages and bytes both ways."""

    nodes: int
    envs: int
    wall_s: float
    cpu_s: float
    messages: float
    num_bytes: float

    @property
    def factors(self) -> tuple[float, float, float]:
        """What the terms a, b and c are multiplied with."""
        return 1.0, float(self.nodes), float(self.nodes * self.envs)


def measure_point(env_fn: EnvFn, nodes: int, envs: int, seconds: float) -> Point:
    """Step a pool of `nodes` nodes with one worker each."""
    chosen = stepmill.RayOptions(num_nodes=nodes, resources={"CPU": 0})
    with stepmill.Pool([env_fn] * (nodes * envs), backend="ray", num_workers=nodes, ray=chosen) as pool:
        pool.reset(seed=0)
        actions = np.zeros(nodes * envs, np.int64)
        for _ in range(WARM_UP):
            PoolPort(pool).step_fast(actions)
        before, wall, cpu = pool.stats().nodes, time.perf_counter(), time.process_time()
        count = 0
        while count == 0 or time.perf_counter() - wall < seconds:
            PoolPort(pool).step_fast(actions)
            count += 1
        wall_s, cpu_s = (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count
        after = pool.stats().nodes
    messages = sum(2 * (new.messages - old.messages) for new, old in zip(after, before, strict=True))
    num_bytes = sum(
        new.sent_bytes + new.received_bytes - old.sent_bytes - old.received_bytes
        for new, old in zip(after, before, strict=True)
    )
    return Point(nodes, envs, wall_s, cpu_s, messages / count, num_bytes / count)


def fit(points: Sequence[Point], values: Sequence[float]) -> NDArray[np.float64]:
    """Return the terms a, b and c >= 0 with the least relative errors."""
    weights = 1.0 / np.array(values)
    factors = np.array([point.factors for point in points]) * weights[:, None]
    best, least = np.zeros(3), np.inf
    for size in (
        3,
        2,
        1,
    ):  # a term that would be negative is 0: the best of all choices of terms without a negative one
        for chosen in itertools.combinations(range(3), size):
            terms, *_ = np.linalg.lstsq(factors[:, chosen], np.ones(len(points)), rcond=None)
            error = float(np.sum((factors[:, chosen] @ terms - 1.0) ** 2))
            if (terms >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = terms
    return best


@contextlib.contextmanager
def added_latency(seconds: float) -> Iterator[None]:
    """Delay each message to and from a node."""
    send, handle = NodeLink._send_exchange, NodeLink._on_answer

    def send_later(link: NodeLink, number: int) -> None:
        threading.Timer(seconds, lambda: link._post(lambda: send(link, number))).start()

    def handle_later(link: NodeLink, answer: Answer, results: Bytes) -> None:
        threading.Timer(seconds, lambda: link._post(lambda: handle(link, answer, results))).start()

    with (
        mock.patch.object(NodeLink, "_send_exchange", send_later),
        mock.patch.object(NodeLink, "_on_answer", handle_later),
    ):
        yield


def print_fit(env_fn: EnvFn, seconds: float, latency_s: float) -> None:
    """Measure with 1, 2 and 4 nodes, and print points, terms, and what they predict for many nodes."""
    print(f"{'nodes':>6}{'envs/node':>10}{'us per step':>14}{'program us':>12}{'messages':>10}{'bytes/env':>11}")
    points = []
    for nodes, envs in itertools.product(NODE_COUNTS, ENVS_PER_NODE):
        point = measure_point(env_fn, nodes, envs, seconds)
        points.append(point)
        per_env = point.num_bytes / (nodes * envs)
        print(
            f"{nodes:>6}{envs:>10}{1e6 * point.wall_s:>14.0f}{1e6 * point.cpu_s:>12.0f}{point.messages:>10.1f}{per_env:>11.1f}",
            flush=True,
        )
    _print_terms("time of a step", points, [point.wall_s for point in points])
    cpu = _print_terms("processor time of the program", points, [point.cpu_s for point in points])
    busy_s = float(cpu @ [1.0, LARGE_NODES, LARGE_NODES * LARGE_ENVS])
    print(
        f"{LARGE_NODES} nodes of {LARGE_ENVS} envs: the program is busy {1e3 * busy_s:.1f} ms per step of all envs, which limits it to "
        f"{1 / busy_s:.1f} steps of all, {LARGE_NODES * LARGE_ENVS / busy_s:.0f} env-steps per second"
    )
    if latency_s:
        _print_latency(env_fn, seconds, latency_s)


def _print_terms(what: str, points: Sequence[Point], values: Sequence[float]) -> NDArray[np.float64]:
    terms = fit(points, values)
    errors = [abs(float(terms @ point.factors) / value - 1) for point, value in zip(points, values, strict=True)]
    a, b, c = 1e6 * terms
    print(
        f"{what}: {a:.0f} us + {b:.0f} us per node + {c:.2f} us per env-step; "
        f"errors of the fit: {100 * np.median(errors):.0f} % (median), {100 * max(errors):.0f} % (largest)"
    )
    return terms


def _print_latency(env_fn: EnvFn, seconds: float, latency_s: float) -> None:
    plain = measure_point(env_fn, LATENCY_NODES, LATENCY_ENVS, seconds)
    with added_latency(latency_s):
        delayed = measure_point(env_fn, LATENCY_NODES, LATENCY_ENVS, seconds)
    more_ms = 1e3 * (delayed.wall_s - plain.wall_s)
    print(
        f"with {1e3 * latency_s:g} ms more each way, a step of {LATENCY_NODES} nodes takes {more_ms:.1f} ms longer; "
        f"the model says {2e3 * latency_s:g} ms, for any number of nodes"
    )
