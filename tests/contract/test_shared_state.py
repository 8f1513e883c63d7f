"""While envs that share a process take their first steps, a change of what the others see is logged once."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.worker import shared_state
from tests.harness.pools import begun, make_pool

_module_steps = 0
_shared_array = np.zeros(3)
_cache: object = None
_is_warned = False


class ChangingEnv(CountingEnv):
    """An env that calls a function in each step."""

    total = 0

    def __init__(self, change: Callable[[ChangingEnv], object]) -> None:
        super().__init__()
        self.change = change

    def step(self, action: Any) -> Any:
        self.change(self)
        return super().step(action)


def change_folder(env: ChangingEnv) -> None:
    os.chdir("/" if os.getcwd() != "/" else "/tmp")


def set_variable(env: ChangingEnv) -> None:
    os.environ["STEPMILL_TEST_OWNER"] = str(id(env))


def draw(env: ChangingEnv) -> None:
    random.random()


def draw_with_numpy(env: ChangingEnv) -> None:
    np.random.rand()  # noqa: NPY002


def draw_with_torch(env: ChangingEnv) -> None:
    sys.modules["torch"].rand(1)


def handle_signals(env: ChangingEnv) -> None:
    signal.signal(signal.SIGUSR2, lambda number, frame: None)


def count_in_module(env: ChangingEnv) -> None:
    global _module_steps
    _module_steps += 1


def count_in_class(env: ChangingEnv) -> None:
    ChangingEnv.total += 1


def count_in_array(env: ChangingEnv) -> None:
    _shared_array[0] += 1


def fill_caches(env: ChangingEnv) -> None:
    """What libraries do in a first step."""
    global _cache, _is_warned
    _cache, _is_warned = (object(), True) if _cache is None else (_cache, True)
    os.environ.setdefault("STEPMILL_TEST_CACHE", "filled")
    os.chdir("/tmp")


def restore_what_changes(env: ChangingEnv) -> None:
    folder, state = os.getcwd(), random.getstate()
    os.chdir("/")
    random.random()
    os.chdir(folder)
    random.setstate(state)


CHANGES = {
    change_folder: "working directory",
    set_variable: "environment variable STEPMILL_TEST_OWNER",
    draw: "generator of random",
    draw_with_numpy: "generator of numpy.random",
    handle_signals: "handler of SIGUSR2",
    count_in_module: f"global variable {__name__}._module_steps",
    count_in_class: "global variable ChangingEnv.total",
    count_in_array: f"global variable {__name__}._shared_array",
}


@pytest.fixture
def read_log(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """Return the warnings of this process and of its forks, and leave the process as it was."""
    folder, handler = os.getcwd(), signal.getsignal(signal.SIGUSR2)
    file = logging.FileHandler(tmp_path / "log")
    logging.getLogger("stepmill").addHandler(file)
    yield lambda: [line for line in (tmp_path / "log").read_text().splitlines() if "share" in line]
    logging.getLogger("stepmill").removeHandler(file)
    file.close()
    os.chdir(folder)
    signal.signal(signal.SIGUSR2, handler)
    for name in ("STEPMILL_TEST_OWNER", "STEPMILL_TEST_CACHE"):
        os.environ.pop(name, None)


def play(where: str, env_fns: list[Callable[[], object]], num_steps: int = 20, **options: Any) -> None:
    with begun(make_pool(where, env_fns, **options)) as pool:
        for _ in range(num_steps):
            pool.step(np.ones(len(env_fns), np.int64))


@pytest.mark.parametrize("where", ["serial", "fork"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_that_other_envs_see_is_logged_once_with_its_kind_and_envs(where, change, read_log):
    play(where, [partial(ChangingEnv, change)] * 4, **({"num_workers": 2} if where == "fork" else {}))
    (line,) = read_log()
    assert f"envs [0, 1] change the {CHANGES[change]}, which" in line
    assert "envs_per_worker=1" in line


def test_torchs_generator_is_among_them(read_log):
    pytest.importorskip("torch")
    play("serial", [partial(ChangingEnv, draw_with_torch)] * 2)
    assert ["generator of torch" in line for line in read_log()] == [True]


@pytest.mark.parametrize("change", [change_folder, set_variable], ids=lambda change: change.__name__)
def test_threads_are_watched_for_paths_and_variables(change, read_log):
    play("thread", [partial(ChangingEnv, change)] * 2, num_workers=2)
    assert [CHANGES[change] in line for line in read_log()] == [True]


def test_threads_are_not_watched_for_what_the_program_changes_too(read_log):
    play("thread", [partial(ChangingEnv, draw)] * 4, num_workers=2)
    assert not read_log()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_env_with_a_process_of_its_own_is_not_watched(change, read_log):
    play("fork", [partial(ChangingEnv, change)] * 2, num_workers=None, envs_per_worker=1)
    assert not read_log()


@pytest.mark.parametrize("change", [fill_caches, restore_what_changes], ids=lambda change: change.__name__)
def test_caches_that_are_filled_once_and_what_a_step_restores_are_no_change(change, read_log):
    play("serial", [partial(ChangingEnv, change)] * 4)
    assert not read_log()


def test_a_generator_that_one_env_alone_uses_is_not_shared(read_log):
    play("serial", [partial(ChangingEnv, draw), *[CountingEnv] * 3])
    assert not read_log()


def test_a_restarted_worker_does_not_log_it_again(read_log):
    play("fork", [partial(ChangingEnv, draw)] * 2, num_workers=1, restarts=stepmill.Restarts(recycle_after_episodes=1))
    assert len(read_log()) == 1


ORDINARY = [
    "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1", "FrozenLake-v1", "Taxi-v4",
    "CliffWalking-v1", "Blackjack-v1", "FrozenLake8x8-v1",
]  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("where", ["serial", "fork"])
def test_ordinary_envs_are_silent(where, name, read_log):
    fns = [partial(gymnasium.make, name)] * 3
    with begun(make_pool(where, fns, **({"num_workers": 1} if where == "fork" else {}))) as pool:
        for _ in range(60):
            pool.step(np.stack([np.asarray(pool.single_action_space.sample()) for _ in fns]))
    assert not read_log()


def test_after_the_first_commands_the_loop_calls_the_envs_own_methods():
    callers: list[str] = []

    def note_caller(env: ChangingEnv) -> None:
        frame = sys._getframe(2)
        callers.append(frame.f_code.co_filename)

    play("serial", [partial(ChangingEnv, note_caller)] * 2)
    num_watched = callers.count(shared_state.__file__)
    assert callers[:num_watched] == [shared_state.__file__] * num_watched
    assert len(callers) > 2 * shared_state.NUM_COMMANDS > num_watched > 0  # resets are commands, too
