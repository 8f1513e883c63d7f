"""Nodes of a Ray pool that die or stop: they are named, and the fault policies deal with them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import threading
import time
from functools import partial

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.chaos import HANG, RAISE, ChaosEnv
from tests.chaos.envs import Traps
from tests.crash.test_replayed_calls import OnceEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import assert_equal, begun, counting_envs, kill_worker
from tests.harness.ray_cluster import NODE_CPUS, add_machine, remove_machine
from tests.harness.ray_nodes import actor_pid, end_processes, envs_of_node, kill_actor, link_of, stop_node, wait_lost
from tests.harness.scripts import start_script
from tests.harness.strangers import bomb_message

pytest.importorskip("ray")
# On a busy machine Ray may need more than 30 s to start an actor.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:envs .* have not answered for:RuntimeWarning")]
FOUND_S = 5.0  # a dead actor is found within this time; Ray needs about one second
NODE_TIMEOUT_S = 3.0


def make_pool(num_envs=4, env_fns=None, node_timeout_s=NODE_TIMEOUT_S, **options):
    chosen = {"seeding": "per_episode", "restarts": {"max_restarts": 100}, **options}
    nodes = stepmill.RayOptions(num_nodes=2, resources={"CPU": 0}, node_timeout_s=node_timeout_s)
    return stepmill.Pool(env_fns or counting_envs(num_envs), backend="ray", num_workers=4, ray=nodes, **chosen)


def test_a_killed_actor_is_named_with_its_envs_and_the_other_node_goes_on(ray_cluster):
    with begun(make_pool()) as pool:
        pool.step(np.arange(4))
        lost = envs_of_node(pool, 1)
        assert lost == [2, 3]
        kill_actor(pool, 1)
        assert wait_lost(pool, 1) < FOUND_S
        pool.send(np.arange(2), [0, 1])
        assert pool.recv(2).obs[:, 2].tolist() == [2, 2]
        with pytest.raises(stepmill.WorkerDied, match=r"worker 2 on node 1 \(.*\) was lost .*envs \[2\]") as caught:
            pool.step(np.arange(4))
        faults = [caught.value, *caught.value.others]
        assert [fault.env_ids for fault in faults] == [(2,), (3,)]
        assert all(fault.node.startswith("node 1") for fault in faults)
        assert pool.recv(2).obs[:, 2].tolist() == [3, 3]
        batch = pool.reset(env_ids=lost)
        assert batch.env_id.tolist() == lost
        batch = pool.step(np.arange(4))
        assert batch.obs[:, 2].tolist() == [4, 4, 1, 1]
        assert [node.restarts for node in pool.stats().nodes] == [0, 1]


def test_a_node_that_is_lost_during_a_step_costs_only_its_own_envs(ray_cluster):
    with begun(make_pool(on_fault="truncate")) as pool:
        pool.step(np.arange(4))
        kill_actor(pool, 0)
        batch = pool.step(np.arange(4))
        assert batch.truncated.tolist() == [True, True, False, False]
        assert batch.info["fault"]["error"][0] == "WorkerDied"
        assert "on node 0" in batch.info["fault"]["message"][0]
        assert batch.obs[2:].tolist() == [[2, 0, 2], [3, 0, 2]]
        batch = pool.step(np.arange(4))
        assert batch.obs[:, 2].tolist() == [0, 0, 3, 3]


def test_a_stopped_node_is_given_up_after_its_time_limit_and_replaced(ray_cluster):
    with begun(make_pool(on_fault="truncate")) as pool:
        pids = stop_node(pool, 1)
        try:
            began = time.monotonic()
            batch = pool.step(np.arange(4))
            assert time.monotonic() - began < NODE_TIMEOUT_S + 2 * FOUND_S
            assert batch.truncated.tolist() == [False, False, True, True]
            assert "did not answer for 3 s" in batch.info["fault"]["message"][2]
            batch = pool.step(np.arange(4))
            assert batch.obs[:, 2].tolist() == [2, 2, 0, 0]
            assert actor_pid(pool, 1) not in pids
        finally:
            end_processes(pids)


@pytest.mark.parametrize("length", [0, 300_000], ids=["small messages", "large messages"])
def test_a_machine_whose_raylet_is_stopped_is_given_up_and_avoided(ray_cluster, length):
    machine = add_machine(ray_cluster)
    nodes = stepmill.RayOptions(num_nodes=3, resources={"CPU": NODE_CPUS}, node_timeout_s=NODE_TIMEOUT_S)
    env_fns = [partial(Padded, length)] * 6
    with begun(stepmill.Pool(env_fns, backend="ray", num_workers=3, ray=nodes, on_fault="truncate")) as pool:
        node = next(node for node in range(3) if link_of(pool, node).started.node_id == machine.node_id)
        lost = envs_of_node(pool, node)
        raylet = machine.all_processes["raylet"][0].process
        os.kill(raylet.pid, signal.SIGSTOP)
        try:
            batch = step_until_truncated(pool)
            assert np.flatnonzero(batch.truncated).tolist() == lost
            message = batch.info["fault"]["message"][lost[0]]
            # On a busy machine Ray may notice before the node's 3 s are over.
            assert re.search(
                rf"on node {node} .*(did not answer .*for 3 s|was lost|marked dead|died)", message, re.DOTALL
            ), message
            pool.send(np.zeros(6, int))
            # All CPUs of the other machines are reserved: the successor waits, and is then divided among them.
            with pytest.warns(RuntimeWarning, match=f"no machine has room for the successor of node {node} "):
                batch = pool.recv(6, timeout_s=HANG_GUARD_S)
            assert batch.obs["count"][lost].tolist() == [0, 0]
            assert link_of(pool, node).started.node_id != machine.node_id
        finally:
            raylet.kill()
            remove_machine(ray_cluster, machine)


def step_until_truncated(pool):
    until = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < until:
        batch = pool.step(np.zeros(pool.num_envs, int))
        if batch.truncated.any():
            return batch
    raise AssertionError("no episode was cut short")


class Slow(gymnasium.Env):
    """Counts its steps, each of which takes some seconds."""

    observation_space = gymnasium.spaces.Discrete(100_000)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, step_s):
        self.step_s, self.count = step_s, 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.count, {}

    def step(self, action):
        time.sleep(self.step_s)
        self.count += 1
        return self.count, 0.0, False, False, {}


class Padded(gymnasium.Env):
    """Counts its steps, and pads its observations."""

    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, length):
        padding = gymnasium.spaces.Box(0, 255, (length,), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(
            {"count": gymnasium.spaces.Discrete(100_000), "padding": padding}
        )
        self.count = 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        return {"count": self.count, "padding": np.zeros(self.observation_space["padding"].shape, np.uint8)}


def test_a_lost_node_is_replayed_elsewhere_bit_for_bit(ray_cluster):
    def run(pool, kills):
        results = [pool.reset(seed=3)]
        rng = np.random.default_rng(0)
        for step in range(40):
            if step in kills:
                kill_actor(pool, kills[step])
            results.append(pool.step(rng.integers(0, 5, 4)))
        return results

    envs = [lambda i=i: ChaosEnv(i) for i in range(4)]
    with stepmill.Pool(envs, backend="serial", seeding="per_episode", on_fault="replay") as pool:
        expected = run(pool, {})
    with make_pool(env_fns=envs, on_fault="replay") as pool:
        actual = run(pool, {7: 0, 19: 1, 30: 0})
        assert [node.restarts for node in pool.stats().nodes] == [2, 1]
    assert_equal([*map(tuple, actual)], [*map(tuple, expected)])


def test_an_env_that_raises_after_a_call_in_its_episode_is_rebuilt_and_replayed(ray_cluster, tmp_path):
    env_fns = [partial(OnceEnv, str(tmp_path), env_id) for env_id in range(4)]
    with begun(make_pool(env_fns=env_fns, on_fault="replay")) as pool:
        pool.step([1] * 4)
        assert pool.call("amplify", 2.0) == (2.0,) * 4
        pool.step([1] * 4)
        Traps(str(tmp_path)).set("step", 1, RAISE)

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False] * 4
        assert batch.reward.tolist() == [6.0] * 4
        assert pool.get_attr("gain") == (2.0,) * 4


def test_a_machine_that_is_lost_is_replaced_by_another(ray_cluster):
    first = add_machine(ray_cluster, resources={"spot": 1})
    chosen = stepmill.RayOptions(num_nodes=1, resources={"CPU": 0, "spot": 1})
    with begun(stepmill.Pool(counting_envs(2), backend="ray", num_workers=2, ray=chosen, on_fault="truncate")) as pool:
        assert link_of(pool, 0).started.node_id == first.node_id
        second = add_machine(ray_cluster, resources={"spot": 1})
        ray_cluster.remove_node(first, allow_graceful=False)
        wait_lost(pool, 0)
        batch = pool.step(np.arange(2))
        assert batch.truncated.tolist() == [True, True]
        batch = pool.step(np.arange(2))
        assert batch.obs[:, 2].tolist() == [0, 0]
        assert link_of(pool, 0).started.node_id == second.node_id
    remove_machine(ray_cluster, second)


def test_the_death_of_a_worker_in_a_node_looks_as_on_one_machine(ray_cluster):
    with begun(make_pool()) as pool:
        kill_worker(pool, 3)
        with pytest.raises(stepmill.WorkerDied, match=r"worker 3 on node 1 .* was ended by SIGKILL") as caught:
            pool.step(np.arange(4))
        assert caught.value.env_ids == (3,)
        assert caught.value.signal_name == "SIGKILL"
        assert pool.recv(3).obs[:, 2].tolist() == [1, 1, 1]
        pool.reset(env_ids=[3])
        assert pool.step(np.arange(4)).obs[:, 2].tolist() == [2, 2, 2, 1]
        assert [node.restarts for node in pool.stats().nodes] == [0, 0]


def test_an_env_that_hangs_is_ended_by_its_node(ray_cluster):
    with begun(
        make_pool(env_fns=[lambda i=i: ChaosEnv(i) for i in range(4)], on_fault="truncate", step_timeout_s=0.5)
    ) as pool:
        batch = pool.step([1, 1, HANG, 1])
        assert batch.truncated.tolist() == [False, False, True, False]
        assert batch.info["fault"]["error"][2] == "EnvTimeout"
        assert "deadline of 0.5 s for a step" in batch.info["fault"]["message"][2]


def test_restarts_of_nodes_are_limited(ray_cluster):
    with begun(make_pool(on_fault="truncate", restarts={"max_restarts": 0})) as pool:
        kill_actor(pool, 1)
        with pytest.raises(stepmill.WorkerDied, match="on node 1"):
            pool.step(np.arange(4))


def test_an_exchange_that_comes_twice_is_done_once(ray_cluster):
    with make_pool() as pool:
        link = link_of(pool, 0)
        send_once = link._send_exchange
        link._send_exchange = lambda number: (send_once(number), send_once(number))  # as after a connection that broke
        pool.reset(seed=0)
        for step in range(20):
            batch = pool.step(np.arange(4))
            assert batch.obs[:, 2].tolist() == [(step + 1) % 6] * 4
        assert pool.call("add", 1.0) == (1.0, 2.0, 3.0, 4.0)
        assert pool.get_attr("num_steps") == (17,) * 4


@pytest.mark.parametrize("pause", [1, 2, 5])
def test_connections_that_break_lose_and_double_nothing(ray_cluster, pause):
    with begun(make_pool()) as pool:
        links = [link_of(pool, node) for node in range(2)]
        num_breaks = 0
        for step in range(60):
            if step % pause == 0 and (stream := links[num_breaks % 2].stream) is not None:
                stream.shut_down()
                num_breaks += 1
            batch = pool.step(np.arange(4))
            assert batch.obs[:, 2].tolist() == [(step + 1) % 6] * 4
        assert num_breaks > 5
        assert pool.call("add", 1.0) == (1.0, 2.0, 3.0, 4.0)
        assert pool.get_attr("num_steps") == (50,) * 4
        assert [node.restarts for node in pool.stats().nodes] == [0, 0]


def test_a_connection_on_which_messages_are_lost_is_made_anew(ray_cluster):
    with begun(make_pool(node_timeout_s=1.0)) as pool:
        pool.step(np.arange(4))
        link = link_of(pool, 0)
        broken = link.stream
        broken.send = lambda header, array: None  # as a firewall that has forgotten the connection
        batch = pool.step(np.arange(4))
        assert batch.obs[:, 2].tolist() == [2] * 4
        assert link.stream is not broken
        assert [node.restarts for node in pool.stats().nodes] == [0, 0]


@contextlib.contextmanager
def stranger_at(link, said):
    """Let another program listen where a node did, and break the node's connection; yield what the pool sends there."""
    heard = bytearray()
    stopped = threading.Event()

    def serve():
        while not stopped.is_set():
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.sendall(said)
                while part := connection.recv(1 << 16):
                    heard.extend(part)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        thread = threading.Thread(target=serve)
        thread.start()
        link._address = server.getsockname()
        link.stream.shut_down()
        try:
            yield heard
        finally:
            stopped.set()
            thread.join()


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "sends a pickle"])
def test_a_node_whose_port_another_program_has_is_lost_and_replaced(ray_cluster, tmp_path, is_silent):
    said = b"" if is_silent else secrets.token_bytes(64) + bomb_message(tmp_path)
    with begun(make_pool(on_fault="truncate")) as pool:
        link = link_of(pool, 0)
        with stranger_at(link, said) as heard:
            began = time.monotonic()
            pool.send(np.arange(4))
            batch = pool.recv(4, timeout_s=HANG_GUARD_S)
            assert time.monotonic() - began > NODE_TIMEOUT_S / 2
        assert batch.truncated.tolist() == [True, True, False, False]
        message = batch.info["fault"]["message"][0]
        assert f"did not answer at 127.0.0.1:{link._address[1]} for 3 s" in message
        assert is_silent or "(another program has this port, and not the key of the node)" in message
        assert link._key not in heard
        assert list(tmp_path.iterdir()) == []
        assert pool.step(np.arange(4)).obs[:, 2].tolist() == [0, 0, 2, 2]


def test_a_node_whose_envs_step_longer_than_its_time_limit_is_not_lost(ray_cluster):
    with begun(make_pool(node_timeout_s=0.5, env_fns=[lambda: Slow(2.0)] * 4)) as pool:
        streams = [link_of(pool, node).stream for node in range(2)]
        assert pool.step(np.zeros(4, int)).obs.tolist() == [1] * 4
        assert [link_of(pool, node).stream for node in range(2)] == streams
        assert [node.restarts for node in pool.stats().nodes] == [0, 0]


@pytest.mark.parametrize("where", ["callback", "message"])
def test_an_error_in_a_callback_or_at_a_message_costs_only_its_own_node(ray_cluster, where):
    with begun(make_pool(on_fault="truncate")) as pool:
        link = link_of(pool, 1)
        if where == "callback":
            link._post(lambda: 1 / 0)
        else:
            link.on_results = lambda answer, results: 1 / 0
        batch = pool.step(np.arange(4))
        assert batch.truncated.tolist() == [False, False, True, True]
        assert "cannot be reached (ZeroDivisionError" in batch.info["fault"]["message"][2]
        assert pool.step(np.arange(4)).obs[:, 2].tolist() == [2, 2, 0, 0]


def test_a_program_that_was_stopped_keeps_its_nodes(ray_cluster):
    script = f"""
        import ray, stepmill
        from stepmill.testing.envs import CountingEnv
        ray.init(address={ray_cluster.address!r}, log_to_driver=False)
        nodes = stepmill.RayOptions(num_nodes=2, resources=dict(CPU=0), node_timeout_s=1)
        with stepmill.Pool([CountingEnv] * 4, backend="ray", num_workers=4, ray=nodes) as pool:
            pool.reset(seed=0)
            while input():
                print(pool.step([0] * 4).obs[:, 2].tolist(), [node.restarts for node in pool.stats().nodes], flush=True)
    """
    with start_script(script, interpreter=()) as program:
        for step in range(1, 6):
            program.stdin.write("step\n")
            program.stdin.flush()
            assert program.stdout.readline() == f"{[step] * 4} [0, 0]\n"
            os.kill(program.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
            time.sleep(3.0)  # the passing of time is what is tested
            os.kill(program.pid, signal.SIGCONT)
        program.communicate("\n", timeout=HANG_GUARD_S)
        assert program.returncode == 0


def test_a_call_comes_between_the_commands_before_and_after_it(ray_cluster):
    with begun(make_pool(on_fault="truncate")) as pool:
        for _ in range(10):
            before = pool.get_attr("num_steps")[0]
            pool.send(np.arange(4))
            future = pool.call_async(count_steps)
            pool.recv(4)
            pool.send(np.arange(4))
            later = pool.call_async(count_steps)
            pool.recv(4)
            assert later.result()[0] >= future.result()[0] >= before
        kill_actor(pool, 0)
        pool.step(np.arange(4))
        assert pool.call("add", 1.0) == (1.0, 2.0, 3.0, 4.0)  # before the node has any new command


def count_steps(env):
    return env.unwrapped.num_steps


def test_nodes_end_when_their_program_is_killed(ray_cluster, tmp_path):
    script = f"""
        import ray, stepmill
        from stepmill.testing.envs import CountingEnv
        ray.init(address={ray_cluster.address!r}, log_to_driver=False)
        pool = stepmill.Pool([CountingEnv] * 4, backend="ray", num_workers=4,
                             ray=stepmill.RayOptions(num_nodes=2, resources=dict(CPU=0)))
        pool.reset(seed=0)
        pids = [link.started.pid for link in pool._runtime.backend._links]
        print(*pids, *[worker.pid for worker in pool.stats().workers], flush=True)
        input()
    """
    from tests.harness import leaks

    with start_script(script, interpreter=()) as program:
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 6
        os.kill(program.pid, signal.SIGKILL)
        assert leaks.wait_until_gone(pids, timeout_s=leaks.GRACE_S) == []
