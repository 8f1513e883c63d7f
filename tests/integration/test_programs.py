"""Whole programs, as users write them: unguarded, from stdin or without one, in daemons and threads, ended in every way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import run_file, run_source

pytestmark = pytest.mark.orphans

MAKE = """
    import stepmill
    from stepmill.testing.envs import CountingEnv

    OFFSET = 5

    class OwnEnv(CountingEnv):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward + OFFSET, *rest

    pool = stepmill.Pool(
        [lambda i=i: OwnEnv(i) for i in range(3)],
        backend="process", num_workers=2, options=stepmill.PoolOptions(context={context!r}),
    )
    assert pool.reset(seed=0).obs[:, 0].tolist() == [0, 1, 2]
    assert pool.step([1, 2, 3]).reward.tolist() == [6.0, 7.0, 8.0]
"""
CONTEXTS = pytest.mark.parametrize("context", [pytest.param("fork", marks=pytest.mark.slow), "forkserver", "spawn"])


def _script(context: str, end: str = "pool.close()") -> str:
    return textwrap.dedent(MAKE).format(context=context) + textwrap.dedent(end) + "\nprint('done')\n"


def _assert_done(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done"]
    assert result.stderr == ""


@CONTEXTS
def test_a_script_needs_no_main_guard(tmp_path, context):
    path = tmp_path / "train.py"
    path.write_text(_script(context))
    _assert_done(run_file(path))


@CONTEXTS
def test_a_script_may_come_from_stdin(tmp_path, context):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=_script(context),
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        cwd=tmp_path,
        check=False,
    )
    _assert_done(result)


@pytest.mark.covers("X-8")
@CONTEXTS
def test_a_program_that_forgets_to_close_ends_all_the_same(context):
    _assert_done(run_source(_script(context, end="")))


@pytest.mark.covers("X-8")
@CONTEXTS
def test_a_program_that_raises_ends_all_the_same(context):
    result = run_source(_script(context, end="raise SystemExit(3)"))
    assert result.returncode == 3
    assert result.stderr == ""
    result = run_source(_script(context, end="1 / 0"))
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1


@pytest.mark.parametrize("context", [pytest.param("fork", marks=pytest.mark.slow), "forkserver"])
def test_a_pool_may_live_in_a_daemonic_process(tmp_path, context):
    path = tmp_path / "daemon.py"
    body = textwrap.indent(textwrap.dedent(_script(context)), "    ")
    path.write_text(
        "import multiprocessing\n"
        f"def work():\n{body}\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work, daemon=True)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    raise SystemExit(process.exitcode)\n"
    )
    _assert_done(run_file(path))


def test_a_program_in_isolated_mode_starts_workers_alike(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(_script("spawn"))
    command = [sys.executable, "-I", str(path)]
    _assert_done(subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False))


@CONTEXTS
def test_a_program_without_stdin_starts_workers_alike(tmp_path, context):
    path = tmp_path / "train.py"
    path.write_text("import os\nos.close(0)\n" + _script(context))
    _assert_done(run_file(path))


@pytest.mark.covers("X-14")
def test_two_pools_at_once_and_many_one_after_another():
    source = """
        import os
        import stepmill
        from stepmill.testing.envs import CountingEnv
        options = stepmill.PoolOptions(context="fork")
        def make():
            return stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, options=options)
        keep = make()
        keep.reset(seed=0)
        with make() as first:
            first.reset(seed=0)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            with make() as pool:
                pool.reset(seed=0)
                pool.step([1, 2])
        assert len(os.listdir("/proc/self/fd")) == before
        assert keep.step([3, 4]).reward.tolist() == [3.0, 4.0]
        keep.close()
        print("done")
    """
    _assert_done(run_source(source))


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_pool_is_made_in_a_thread_that_ends_and_used_in_another(context: str) -> None:
    # The death of the thread that made the pool must not look like the death of the learner.
    made: list[stepmill.Pool] = []

    def make() -> None:
        env_fns = [partial(CountingEnv, length=100)] * 3
        options = stepmill.PoolOptions(context=context)  # type: ignore[arg-type]
        made.append(stepmill.Pool(env_fns, backend="process", num_workers=2, options=options))
        made[0].reset(seed=0)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    for action in range(1, 50):
        assert made[0].step([action] * 3).reward.tolist() == [float(action)] * 3
    made.pop().close()


@pytest.mark.parametrize(
    ("backend", "name"),
    [("process", "fork"), pytest.param("process", "forkserver", marks=pytest.mark.slow), ("thread", "fork")],
)
def test_too_many_workers_for_the_systems_limits_are_refused_and_nothing_is_kept(backend: str, name: str) -> None:
    source = f"""
        import os, resource
        import stepmill
        from stepmill.backends.starter_client import STARTERS
        from stepmill.testing import CountingEnv
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        before = len(os.listdir("/proc/self/fd"))
        options = stepmill.PoolOptions(context={name!r})
        try:
            stepmill.Pool([CountingEnv] * 60, backend={backend!r}, num_workers=60, options=options)
        except stepmill.UsageError as error:
            print(error)
        STARTERS.close()  # which the next pool would use
        print(len(os.listdir("/proc/self/fd")) - before)
    """
    done = run_source(source)
    assert done.stderr == ""
    assert "60 workers could not be started" in done.stdout
    assert "ulimit -n" in done.stdout
    assert done.stdout.endswith("\n0\n")
