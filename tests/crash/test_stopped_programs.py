"""A program that is stopped (Ctrl-Z) and continued goes on as before: its deadlines count time in which it ran."""

from __future__ import annotations

import os
import signal
import time

import pytest

from stepmill.testing.gates import Gate
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import start_script

STEP_TIMEOUT_S = 2.0
STOP_S = 2 * STEP_TIMEOUT_S
NUM_STOPS = 1

PROGRAM = """
    import os, sys
    from functools import partial
    import stepmill
    from stepmill.testing.gates import GATED_ACTION, GateEnv

    os.setpgid(0, 0)
    path, limit_s, policy, num_steps = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    options = stepmill.PoolOptions(step_timeout_s=limit_s, reset_timeout_s=limit_s, context="fork", on_fault=policy)
    pool = stepmill.Pool([partial(GateEnv, path)] * 2, backend="process", num_workers=2, options=options)
    pool.reset(seed=0)
    for step in range(num_steps):
        batch = pool.step([5, GATED_ACTION])
        print(batch.reward.tolist(), batch.truncated.tolist(), flush=True)
    pool.close()
"""


@pytest.mark.orphans
@pytest.mark.parametrize("policy", ["raise", "truncate"])
def test_no_deadline_passes_while_the_whole_program_is_stopped(policy: str) -> None:
    arguments = (str(STEP_TIMEOUT_S), policy, str(NUM_STOPS))
    with Gate() as gate, start_script(PROGRAM, str(gate.path), *arguments) as program:
        for _ in range(NUM_STOPS):
            gate.wait_arrivals()
            time.sleep(STEP_TIMEOUT_S / 8)  # its deadline runs: the reaper has seen the step
            pids = {program.pid, *leaks.descendants(program.pid)}
            os.killpg(program.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
            time.sleep(STOP_S)  # the passing of time is what is tested
            os.killpg(program.pid, signal.SIGCONT)
            gate.open()
            assert program.stdout.readline() == "[5.0, 99.0] [False, False]\n", program.communicate()[1]
        assert program.communicate(timeout=60)[1] == ""
        assert program.returncode == 0
        assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
