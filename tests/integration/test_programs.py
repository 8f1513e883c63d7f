"""Whole programs, as users write them: unguarded, from stdin, in daemons, ended in every way."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

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
