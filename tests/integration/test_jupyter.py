"""A pool in a Jupyter kernel: its env's class is a cell's, Ctrl-C is the stop button, and the end is "restart kernel".

Needs ipykernel, which `make test-jupyter` puts into an environment beside .venv.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import run_source

pytestmark = [
    pytest.mark.orphans,
    pytest.mark.skipif(importlib.util.find_spec("ipykernel") is None, reason="needs ipykernel; make test-jupyter"),
]

NOTEBOOK = """
    import os, sys, time
    from pathlib import Path
    from jupyter_client.manager import start_new_kernel

    context, folder = sys.argv[1], Path(sys.argv[2])
    DEFINE = f'''
    import time
    from pathlib import Path
    import gymnasium, numpy as np, stepmill

    class CellEnv(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(5)
        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {{}}
        def step(self, action):
            if action == 4:
                Path({str(folder)!r}, "inside").touch()
                while not Path({str(folder)!r}, "open").exists():
                    time.sleep(0.01)
            return np.ones(2, np.float32), float(action), False, False, {{}}

    def make():
        options = stepmill.PoolOptions(context={context!r})
        pool = stepmill.Pool([CellEnv, CellEnv], backend="process", num_workers=2, options=options)
        pool.reset(seed=0)
        return pool

    pool = make()
    print(*[worker.pid for worker in pool.stats().workers])
    '''
    manager, client = start_new_kernel(kernel_name="python3")

    def run(code):
        said = []
        reply = client.execute_interactive(code, timeout=60, output_hook=lambda message: said.append(message["content"]))
        return reply["content"], "".join(part.get("text", "") for part in said)

    def expect(code, text):
        reply, said = run(code)
        assert said == text, (reply, said)

    def wait_until(is_so):
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def is_gone(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    try:
        reply, said = run(DEFINE)
        assert reply["status"] == "ok", reply
        first = [int(word) for word in said.split()]
        expect("print(pool.step([1, 2]).reward.sum())", "3.0\\n")

        # Stays in there until it is interrupted. A kernel aborts what it is sent just after a failure, unless told otherwise.
        request = client.execute("pool.step([4, 2])", stop_on_error=False)
        wait_until((folder / "inside").exists)
        manager.interrupt_kernel()
        while (message := client.get_shell_msg(timeout=30))["parent_header"].get("msg_id") != request:
            pass
        assert message["content"]["ename"] == "KeyboardInterrupt", message["content"]
        (folder / "open").touch()
        expect("print(pool.recv(2).reward.sum())", "6.0\\n")  # the pool stays usable, nothing is lost
        expect("print(pool.step([1, 1]).reward.sum())", "2.0\\n")

        manager.restart_kernel(now=True)
        wait_until(lambda: all(is_gone(pid) for pid in first))
        client.wait_for_ready(timeout=60)
        second = [int(word) for word in run(DEFINE)[1].split()]
        assert len(second) == 2
        manager.shutdown_kernel(now=False)  # as "shut down": nothing closes the pool
        wait_until(lambda: all(is_gone(pid) for pid in second))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print("done")
"""


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_notebook_makes_interrupts_and_restarts_pools(context: str, tmp_path):
    done = run_source(NOTEBOOK, context, str(tmp_path), timeout_s=110)
    assert done.stdout.endswith("done\n"), done.stderr
    assert leaks.wait_until_gone(leaks.descendants(), timeout_s=HANG_GUARD_S) == []


MONITOR = """
    from jupyter_client.manager import start_new_kernel

    DRAW = '''
    import stepmill
    from stepmill.testing import CountingEnv
    pool = stepmill.Pool([CountingEnv] * 2)
    pool.reset(seed=0)
    with stepmill.monitor(pool, interval_s=0.01):
        for _ in range(5):
            pool.step([1, 1])
    pool.close()
    '''
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        said = []
        reply = client.execute_interactive(DRAW, timeout=60, output_hook=said.append)
        assert reply["content"]["status"] == "ok", reply
        drawn = [m for m in said if m["msg_type"] in ("display_data", "update_display_data")]
        assert drawn and "steps/s" in drawn[-1]["content"]["data"]["text/plain"], said
        assert len([m for m in said if m["msg_type"] == "display_data"]) == 1, "one picture, which is replaced"
        assert "ipywidgets" not in str(said)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
"""


def test_the_monitor_draws_one_picture_in_a_notebook_without_further_libraries():
    done = run_source(MONITOR)
    assert done.returncode == 0, done.stderr
