"""Workers get the wrappers of Stable-Baselines3 without an import of the library. A small package stands for it here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import pytest

import stepmill

_MONITOR = """\
import gymnasium

class Monitor(gymnasium.Wrapper):
    limit = 3

    def loaded(self):
        import sys
        return [name for name in ("stable_baselines3", __name__) if name in sys.modules]

    def is_found_by_import(self):
        from stable_baselines3.common.monitor import Monitor as imported
        return isinstance(self, imported), imported.limit

class Unpicklable(gymnasium.Wrapper):
    frames = (frame for frame in ())
"""


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of `Monitor` in a package with the name of the library."""
    folder = tmp_path / "stable_baselines3" / "common"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "monitor.py").write_text(_MONITOR)
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        yield import_module("stable_baselines3.common.monitor")


def _maker(wrapper: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
    return lambda: wrapper(gymnasium.make("CartPole-v1"))


def test_a_worker_does_not_import_the_library_of_its_monitor(monitor: Any) -> None:
    with stepmill.Pool([_maker(monitor.Monitor)] * 2, backend="process", num_workers=1) as pool:
        assert pool.call("loaded") == ([], [])


def test_what_the_program_has_changed_in_the_monitor_reaches_the_workers(monitor: Any) -> None:
    monitor.Monitor.limit = 5
    with stepmill.Pool([_maker(monitor.Monitor)], backend="process") as pool:
        assert pool.get_attr("limit") == (5,)


def test_the_monitor_that_a_worker_imports_later_is_the_one_in_use(monitor: Any) -> None:
    monitor.Monitor.limit = 5
    with stepmill.Pool([_maker(monitor.Monitor)], backend="process") as pool:
        assert pool.call("is_found_by_import") == ((True, 5),)
        assert pool.call("loaded") == (["stable_baselines3", monitor.__name__],)


_USER = """\
from stable_baselines3.common.monitor import Monitor

class Own(Monitor):
    pass
"""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_monitor_and_a_class_derived_from_it_are_of_one_class_in_a_worker(
    monitor: Any, tmp_path: Path, order: tuple[int, int]
) -> None:
    (tmp_path / "of_the_user.py").write_text(_USER)
    own = import_module("of_the_user").Own
    kind = monitor.Monitor
    makers = [_maker(kind), _maker(own)]
    with stepmill.Pool([makers[at] for at in order], backend="process", num_workers=1) as pool:
        assert pool.call(lambda env: isinstance(env, kind)) == (True, True)
    with stepmill.Pool([_maker(own)], backend="process") as pool:
        assert pool.call(lambda env: isinstance(env, kind)) == (True,)


def test_an_env_with_a_monitor_can_be_returned_to_the_program(monitor: Any) -> None:
    with stepmill.Pool([_maker(monitor.Monitor)], backend="process") as pool:
        (returned,) = pool.call(lambda env: type(env))
        assert returned is monitor.Monitor


def test_a_wrapper_that_has_no_value_to_send_is_sent_by_name(monitor: Any) -> None:
    with stepmill.Pool([_maker(monitor.Unpicklable)], backend="process") as pool:
        assert pool.call(lambda env: type(env).__name__) == ("Unpicklable",)
