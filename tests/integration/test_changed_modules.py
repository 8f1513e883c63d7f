"""A warning names what the program has changed in modules that workers import themselves."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import gymnasium
import pytest
from gymnasium.envs.toy_text import frozen_lake

import stepmill
from stepmill.worker.module_contents import MAX_ENTRIES, find_differences, read_contents
from tests.harness.scripts import run_file

_NUMBERS = itertools.count()
_SETTINGS = """\
import functools
import os
import time
from decimal import Decimal

LIMIT = 10
OPTIONS = {"gain": 1.0}
STARTED = time.monotonic()
PID = os.getpid()
CACHE = {}
LATER = None
_is_ready = False


def scale(value):
    return value * 2


def doubled(function):
    @functools.wraps(function)
    def call(value):
        return function(value) * 2
    return call
"""
_ENV = """\
import gymnasium
import numpy as np

import SETTINGS as settings


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    gain = 3

    def reset(self, *, seed=None, options=None):
        settings.CACHE["seed"] = seed
        assert self.gain  # pytest rewrites it in test modules
        return np.full(1, settings.scale(settings.LIMIT), np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules of settings and of an env, with names that no other test has used."""
    number = next(_NUMBERS)
    names = f"changed_settings_{number}", f"changed_env_{number}"
    (tmp_path / f"{names[0]}.py").write_text(_SETTINGS)
    (tmp_path / f"{names[1]}.py").write_text(_ENV.replace("SETTINGS", names[0]))
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module(names[0]), import_module(names[1])
    for name in names:
        del sys.modules[name]


def _start(env: ModuleType, context: str = "forkserver", **workers: object) -> list[float]:
    """Return what the envs observe first."""
    options = stepmill.PoolOptions(context=context, workers=workers)
    with stepmill.Pool([env.Env] * 4, num_workers=2, backend="process", options=options) as pool:
        return pool.reset(seed=0).obs.ravel().tolist()


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_changed_value_is_named_with_both_values(modules, context):
    settings, env = modules
    settings.LIMIT = 99
    with pytest.warns(
        RuntimeWarning, match=rf"{settings.__name__}\.LIMIT \(99 in the program, 10 in the workers\);.*fork"
    ):
        _start(env, context)


def test_a_fork_has_what_the_program_has_and_there_is_no_warning(modules):
    settings, env = modules
    settings.LIMIT = 99
    assert _start(env, "fork") == [198.0] * 4


def test_modules_as_they_were_imported_cause_no_warning(modules):
    settings, env = modules
    settings.CACHE["made"] = "by use"
    settings.LATER = object()  # made at the first use
    settings._is_ready = True
    _start(env)  # warnings are errors


def _assert_named(texts: Iterable[str], start: Callable[[], None]) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        start()
    (warning,) = caught
    assert [text for text in texts if not re.search(text, str(warning.message))] == []


PATCHES = [
    {
        "settings.OPTIONS": ({"gain": 2.0}, r"OPTIONS \({'gain': 2.0} in the program, {'gain': 1.0} in the workers\)"),
        "settings.scale": (
            lambda value: value,
            r"scale \(.*lambda.* in the program, the function scale in the workers",
        ),
        "env.Env.step": (lambda self, action: None, r"Env\.step \(.* in the program, the function Env\.step in the wo"),
        "env.Env.gain": (4, r"Env\.gain \(4 in the program, 3 in the workers\)"),
        "settings.Decimal": (float, r"Decimal \(the class builtins\.float in the program, the class decimal\.Decimal"),
    },
    {
        "settings.scale": (mock.Mock(), r"scale \(a Mock in the program, the function scale in the workers\)"),
        "settings.LIMIT": ("a" * 200, r"LIMIT \('a{50,}a* \.\.\. in the program, 10 in the workers\)"),
    },
]


@pytest.mark.parametrize("patches", PATCHES, ids=["values", "odd values"])
def test_what_was_patched_is_named(modules, monkeypatch, patches):
    settings, env = modules
    for target, (value, _) in patches.items():
        holder, _, name = target.rpartition(".")
        monkeypatch.setattr(eval(holder, {"settings": settings, "env": env}), name, value)
    _assert_named([text for _, text in patches.values()], lambda: _start(env))


def test_a_function_that_a_function_of_its_own_module_wraps_is_named(modules):
    settings, env = modules
    settings.scale = settings.doubled(settings.scale)
    text = r"scale \(the function scale \(call of changed_settings_\d+\.py\) in the program, the function scale in the workers\)"
    with pytest.warns(RuntimeWarning, match=text):
        _start(env)


def test_a_number_too_long_to_be_written_does_not_keep_a_pool_from_starting(modules):
    settings, env = modules
    path = Path(str(settings.__file__))
    path.write_text(path.read_text() + "FULL = (1 << 128 * 128) - 1\nMASKS = {'full': FULL, 'empty': 0}\n")
    importlib.reload(settings)
    _start(env)  # warnings are errors


def test_many_differences_are_one_warning_of_the_first_five(modules):
    settings, env = modules
    for attribute in ("gain", "step", "reset"):
        setattr(env.Env, attribute, 7)
    settings.LIMIT, settings.OPTIONS, settings.scale = 1, {"gain": 7}, len
    with pytest.warns(RuntimeWarning, match="and 1 more; pass") as caught:
        _start(env)
    assert len(caught) == 1


def test_a_warning_that_is_an_error_leaves_no_worker(modules):
    settings, env = modules
    settings.LIMIT = 99
    with pytest.raises(RuntimeWarning, match="LIMIT"):  # the fixtures of all tests look for processes
        _start(env)


@pytest.mark.parametrize("limit", [99, 7])
def test_what_workers_init_changes_too_causes_no_warning(modules, limit):
    settings, env = modules
    settings.LIMIT = 99

    def change():
        settings.LIMIT = limit

    assert _start(env, init=change) == [2.0 * limit] * 4


def test_what_workers_init_does_not_change_is_named_with_the_way_to_change_it(modules):
    settings, env = modules
    settings.LIMIT = 99
    with pytest.warns(RuntimeWarning, match=r"LIMIT \(99 in the program, 10 in the workers\); pass .*workers={'init'"):
        assert _start(env, init=lambda: settings.STARTED) == [20.0] * 4


def test_a_module_that_loads_when_it_is_used_is_not_loaded(monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

    monkeypatch.setitem(sys.modules, "lazy_one", Lazy("lazy_one"))
    assert "lazy_one" not in {module for module, _ in read_contents()}
    assert find_differences([{("lazy_one", "name"): "1"}, {("not_imported", "name"): "1"}]) == []


def test_a_module_that_only_workers_have_imported_causes_no_warning(modules):
    names = [module.__name__ for module in modules]
    with mock.patch.dict(sys.modules):
        for name in names:
            del sys.modules[name]
        stepmill.Pool([lambda: import_module(names[1]).Env()] * 2, num_workers=1, backend="process").close()


def test_at_most_so_many_names_are_read(monkeypatch, modules):
    settings, _ = modules
    vars(settings).update({f"VALUE_{index}": index for index in range(2 * MAX_ENTRIES)})
    assert len(read_contents()) == MAX_ENTRIES


def test_workers_find_the_modules_of_a_notebook_that_has_changed_its_folder(tmp_path):
    (tmp_path / "before").mkdir()
    (tmp_path / "settings.py").write_text("LIMIT = 5")
    (tmp_path / "before" / "settings.py").write_text(_SETTINGS)
    (tmp_path / "before" / "env_of_notebook.py").write_text(_ENV.replace("SETTINGS", "settings"))
    (tmp_path / "notebook.py").write_text(
        "import os, sys\n"
        "import stepmill\n"
        "sys.path[0] = ''\n"
        "os.chdir('before')\n"
        "import env_of_notebook\n"
        "os.chdir('..')\n"
        "with stepmill.VectorEnv([env_of_notebook.Env] * 2, num_workers=2) as envs:\n"
        "    print(envs.reset(seed=0)[0].ravel().tolist())\n"
    )
    finished: subprocess.CompletedProcess[str] = run_file(tmp_path / "notebook.py")
    assert finished.stdout == "[20.0, 20.0]\n", finished.stderr


# ---- packages: the modules that define the classes of envs ----------------------------------------------------------------

_LAKE = "gymnasium.envs.toy_text.frozen_lake"


def _make_lake() -> gymnasium.Env:
    return gymnasium.make("FrozenLake-v1")


def _start_lakes(env_fn=_make_lake, **workers: object) -> None:
    options = stepmill.PoolOptions(context="forkserver", workers=workers)
    stepmill.Pool([env_fn] * 2, num_workers=2, backend="process", options=options).close()


def _other(self, *args, **kwargs):
    raise AssertionError("only workers have envs, and they have the package's own code")


class _Lake(frozen_lake.FrozenLakeEnv):
    pass


PACKAGE_PATCHES = [
    [
        (
            frozen_lake.FrozenLakeEnv,
            "step",
            _other,
            rf"{_LAKE}\.FrozenLakeEnv\.step \(the function _other \(_other of ",
        ),
        (gymnasium.wrappers.TimeLimit, "step", _other, r"gymnasium\.wrappers\.common\.TimeLimit\.step \("),
        (gymnasium.Env, "close", _other, r"gymnasium\.core\.Env\.close \("),
        (gymnasium, "make", _other, r"gymnasium\.make \(the function _other .* in the program, the function make "),
        (gymnasium.Wrapper, "added", _other, r"Wrapper\.added \(the function _other .* in the program, nothing in"),
    ],
    [
        (frozen_lake, "FrozenLakeEnv", _Lake, rf"{_LAKE}\.FrozenLakeEnv \(the class tests\..*\._Lake in the program, "),
        (frozen_lake, "LEFT", 7, rf"{_LAKE}\.LEFT \(7 in the program, 0 in the workers\)"),
    ],
]


@pytest.mark.parametrize("patches", PACKAGE_PATCHES, ids=["functions", "values"])
def test_what_was_patched_in_the_package_of_an_env_is_named(monkeypatch, patches):
    for holder, name, value, _ in patches:
        monkeypatch.setattr(holder, name, value, raising=False)
    _assert_named([text for *_, text in patches], _start_lakes)


def test_what_an_env_changes_in_its_package_causes_no_warning():
    def make_changed_lake():
        frozen_lake.LEFT = 7
        frozen_lake.FrozenLakeEnv.render = _other
        return gymnasium.make("FrozenLake-v1")

    _start_lakes(make_changed_lake)


def test_what_workers_init_changes_in_a_package_causes_no_warning():
    def change():
        frozen_lake.LEFT = 7

    _start_lakes(init=change)


def test_an_env_without_attributes_has_no_further_layer():
    assert read_contents(envs=[object()]) == read_contents()
