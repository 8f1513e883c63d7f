"""`workers.init`: a function that each worker calls first, also a worker that was restarted."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import Gate, wait_at
from stepmill.worker.module_contents import unchanged
from tests.harness.interrupts import wait_for_threads
from tests.harness.pools import begun, kill_worker, make_pool
from tests.harness.scripts import run_file
from tests.harness.strangers import Unloadable

PROCESSES = ["forkserver", "spawn", "fork"]
_WORD = "STEPMILL_TEST_WORKER_INIT"


class WordEnv(CountingEnv):
    """Remembers what `workers.init` had done when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.word = os.environ.get(_WORD)

    def where(self) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()


def _write(path: Path) -> None:
    """Append the process and the thread to a file, and set a variable that WordEnv reads."""
    with path.open("a") as file:
        file.write(f"{os.getpid()} {threading.get_ident()}\n")
    os.environ[_WORD] = "set"


def _raise() -> None:
    raise ValueError("no licence")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The file to which `_write` writes."""
    monkeypatch.delenv(_WORD, raising=False)
    yield tmp_path / "calls"
    os.environ.pop(_WORD, None)


def _read(calls: Path) -> list[tuple[int, ...]]:
    return [tuple(map(int, line.split())) for line in calls.read_text().splitlines()]


@pytest.mark.parametrize("where", [*PROCESSES, "thread"])
def test_each_worker_calls_it_once_before_it_builds_envs(calls, where):
    with make_pool(where, [WordEnv] * 4, num_workers=2, workers={"init": functools.partial(_write, calls)}) as pool:
        assert pool.get_attr("word") == ("set",) * 4
        assert sorted(_read(calls)) == sorted(set(pool.call("where")))


def test_the_serial_backend_calls_it_in_the_calling_thread(calls):
    with make_pool("serial", [WordEnv] * 2, workers={"init": functools.partial(_write, calls)}) as pool:
        assert pool.get_attr("word") == ("set",) * 2
    assert _read(calls) == [(os.getpid(), threading.get_ident())]


@pytest.mark.parametrize("where", PROCESSES)
def test_a_worker_that_is_restarted_calls_it_again(calls, where):
    init = functools.partial(_write, calls)
    with begun(make_pool(where, [WordEnv] * 2, num_workers=1, workers={"init": init}, on_fault="truncate")) as pool:
        kill_worker(pool)
        pool.step([0, 0])
        pool.step([0, 0])
        assert pool.get_attr("word") == ("set",) * 2
        assert _read(calls)[1:] == [pool.call("where")[0]]


def test_a_module_that_it_makes_importable_is_found_by_the_env_fns(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "far_env.py").write_text(
        "from stepmill.testing.envs import CountingEnv\nclass FarEnv(CountingEnv):\n    pass\n"
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nimport stepmill\n"
        f"sys.path.append({str(tmp_path / 'away')!r})\nimport far_env\nsys.path.pop()\n"
        f"def init():\n    sys.path.append({str(tmp_path / 'away')!r})\n"
        "options = stepmill.PoolOptions(workers=stepmill.Workers(init=init))\n"
        "with stepmill.Pool([far_env.FarEnv] * 2, backend='process', num_workers=1, options=options) as pool:\n"
        "    print(pool.reset(seed=0).obs.shape)\n"
    )
    result = run_file(program)
    assert (result.stdout.strip(), result.stderr) == ("(2, 3)", "")


@pytest.mark.parametrize(
    ("where", "threads"), [*((where, 1) for where in [*PROCESSES, "thread", "serial"]), ("forkserver", 2), ("fork", 2)]
)
def test_what_it_raises_is_an_error_that_names_the_worker_and_the_remedy(where, threads):
    with pytest.raises(ValueError, match=r"workers.init raised ValueError: no licence in worker 0.*repair it") as info:
        make_pool(where, [WordEnv] * 4, num_workers=2, workers={"init": _raise, "threads_per_worker": threads})
    error = info.value
    assert isinstance(error, stepmill.EnvError)
    assert (error.env_id, error.phase, error.error_type) == (None, "worker_init", "ValueError")
    assert "_raise" in error.remote_traceback
    assert len(error.others) == (0 if where == "serial" else 1)


def test_functions_that_cannot_be_loaded_are_named_by_workers_with_threads():
    with pytest.raises(stepmill.EnvError, match=r"the env_fn of env \d cannot be rebuilt from its pickle"):
        make_pool("forkserver", [Unloadable()] * 4, num_workers=1, workers={"threads_per_worker": 2})


def _exit() -> None:
    os._exit(3)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("init", "text"), [(_exit, "exit code 3"), (_kill, "SIGKILL")])
def test_a_worker_that_ends_in_it_is_named(init, text):
    with pytest.raises(stepmill.WorkerDied, match=f"worker 0 .*{text}.*it was in workers.init; stderr may say why"):
        make_pool("forkserver", [WordEnv] * 2, num_workers=1, workers={"init": init})


@pytest.mark.parametrize("where", ["forkserver", "fork", "thread"])
def test_its_time_limit_is_that_of_the_start(where):
    text = r"worker 0 was still in workers.init after 1 s; make workers.init faster, or raise start.timeout_s"
    with Gate() as gate:
        with pytest.raises(stepmill.EnvTimeout, match=text) as info:
            make_pool(
                where, [WordEnv], workers={"init": functools.partial(wait_at, gate.path)}, start={"timeout_s": 1.0}
            )
        gate.wait_arrivals()
    wait_for_threads()
    assert info.value.env_id is None


class _Unpicklable:
    def __call__(self) -> None:
        pass

    def __reduce__(self) -> str:
        raise TypeError("it has a socket")


def test_a_function_that_cannot_be_sent_is_refused():
    with pytest.raises(
        stepmill.UsageError, match=r"workers.init cannot be pickled: TypeError: it has a socket; .*fork"
    ):
        make_pool("forkserver", [WordEnv], workers={"init": _Unpicklable()})
    with make_pool("fork", [WordEnv], workers={"init": _Unpicklable()}) as pool:
        pool.reset(seed=0)


def test_a_function_that_cannot_be_loaded_is_named():
    with pytest.raises(
        stepmill.EnvError, match=r"worker 0 could not load workers.init: ImportError.*importable"
    ) as info:
        make_pool("forkserver", [WordEnv], workers={"init": Unloadable()})
    assert info.value.phase == "worker_init"


def test_only_what_had_another_content_before_is_left_out():
    before = {("m", "a"): "old", ("m", "b"): "old"}
    after = {("m", "a"): "old", ("m", "b"): "new", ("m", "c"): "new", ("n", "a"): "new"}
    assert unchanged(after, before) == {key: text for key, text in after.items() if key != ("m", "b")}
