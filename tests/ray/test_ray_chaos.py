"""Nodes are killed again and again while a pool runs: no transition is lost, doubled, stale, or of another env.

make test-ray PYTEST_ARGS="-m soak --node-kills 30 -s tests/ray/test_ray_chaos.py"
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import pytest

import stepmill
from tests.chaos import ChaosReport
from tests.chaos.kinds import Kind
from tests.chaos.rounds import Round
from tests.harness.ray_nodes import link_of
from tests.pool_model.envs import KILL, RAISE

pytest.importorskip("ray")
# A reset of an env that has failed meanwhile says that it drops the result, and the model expects that.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:.*this reset drops:RuntimeWarning")]
MAX_LOOPS = 12  # between two kills


def make_kind(policy, **fields):
    nodes = stepmill.RayOptions(num_nodes=2, resources={"CPU": 0}, node_timeout_s=5.0)
    options = {"backend": "ray", "ray": nodes, "on_fault": policy, "step_timeout_s": 20.0, "reset_timeout_s": 20.0}
    if policy == "replay":  # it cannot repair an env that always fails
        fields["fatal"] = ()
    return Kind(name=f"ray, {policy}", backend="ray", num_workers=4, options=options, **{"calls": (), **fields})


def kill_soon(pool, rng):
    """Kill the actor of a node in a moment, unless the node is being replaced."""
    link = link_of(pool, rng.randrange(2))
    if link.cause is None:

        def kill():
            with contextlib.suppress(ProcessLookupError):  # the pool has given it up meanwhile
                os.kill(link.started.pid, signal.SIGKILL)

        timer = threading.Timer(rng.random() * 0.02, kill)
        timer.start()
        return timer
    return None


def break_connection(pool, rng):
    """Break the connection to a node; return how many were broken."""
    stream = link_of(pool, rng.randrange(2)).stream
    if stream is None:  # it is being made
        return 0
    stream.shut_down()
    return 1


def run_round(policy, *, is_sync, num_kills, seed, **fields):
    began, report, rng = time.monotonic(), ChaosReport(seed), random.Random(seed)
    chaos = Round(report, rng, make_kind(policy, **fields), is_sync=is_sync, context="forkserver")
    killed = broken = 0
    with chaos.folder, chaos.pool as pool:
        chaos.begin()
        while killed < num_kills:
            broken += break_connection(pool, rng)
            for _ in range(rng.randint(1, MAX_LOOPS)):
                chaos.advance()
                broken += break_connection(pool, rng) if rng.random() < 0.2 else 0
            timer = kill_soon(pool, rng)
            chaos.advance()
            if timer is not None:
                timer.join()
                killed += 1
        for _ in range(3):
            chaos.advance()
        chaos.end()
        num_replaced = sum(node.restarts for node in pool.stats().nodes)
    report.seconds = time.monotonic() - began
    report.inflicted |= {"kill of a node": killed, "broken connection": broken}
    print(
        f"\n{policy}, {'sync' if is_sync else 'async'}: {killed} kills of nodes, {num_replaced} nodes replaced, {broken} broken connections, {report.transitions} "
        f"transitions, of which wrong, lost, doubled or stale: {report.num_wrong}"
    )
    assert num_replaced >= killed / 2  # a second kill may hit a node whose first has not been noticed
    assert report.num_wrong == 0, str(report)
    assert report.transitions > 10 * num_kills
    assert broken > 0
    return report


@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_no_transition_is_wrong_while_nodes_are_killed(ray_cluster, policy):
    run_round(policy, is_sync=policy == "truncate", num_kills=2, seed=5, fatal=())


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("is_sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_no_transition_is_wrong_in_many_kills_of_nodes_and_other_faults(ray_cluster, policy, is_sync, request):
    num_kills = request.config.getoption("--node-kills")
    print(run_round(policy, is_sync=is_sync, num_kills=num_kills, seed=6, fatal=(KILL, RAISE), resets=()))
