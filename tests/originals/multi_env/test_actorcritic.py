"""The same program with actorcritic's own classes and with ours: what is the same, and the faults that ours does not have."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stepmill.frontends import multi_env
from stepmill.spec.errors import StepmillError
from tests.originals.either import fixture_of
from tests.originals.multi_env.sides import CHECKOUT, MARKS, Maker, Walk, load_original, pid_of
from tests.originals.pages import run_page
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = MARKS
make = fixture_of(Maker)


@pytest.mark.covers("M-1")
def test_the_signatures_are_actorcritics() -> None:
    original, found = load_original(), []
    for name in ("MultiEnv", "SubprocessEnv", "create_subprocess_envs"):
        found += [f"{name}.{each}" for each in differences(getattr(multi_env, name), getattr(original, name))]
    check_listed("multi_env", found, {})


@pytest.mark.covers("M-12")
def test_protected_methods_that_take_no_effect_are_refused_and_named_by_the_page() -> None:
    check_protected("multi_env", [(multi_env.SubprocessEnv, load_original().SubprocessEnv)])


@pytest.mark.covers("M-1", "M-7", "M-8", "G-16/multi_env", "G-20/skipping")
def test_lists_and_skipped_envs(make: Maker) -> None:
    envs = make.multi([Walk] * 3)
    assert (envs.observation_space, envs.action_space) == ("observations", "actions")
    assert envs.reset() == [{"episode": 1, "t": 0, "kwargs": {}}] * 3
    observations, rewards, terminals, infos = envs.step([1, None, (2, "x")])
    assert observations == [{"episode": 1, "t": 1, "action": 1}, None, {"episode": 1, "t": 1, "action": (2, "x")}]
    assert (rewards, terminals, infos) == ([1.0, None, 1.0], [False, None, False], [{"t": 1}, None, {"t": 1}])


@pytest.mark.covers("M-9", "M-B2")
def test_the_first_observation_after_the_end(make: Maker) -> None:
    envs = make.multi([Walk] * 3)
    envs.reset()
    for _ in range(3):
        terminals = envs.step([1, 1, 1])[2]
    assert terminals == [True] * 3
    observations = envs.step([7, 7, 7])[0]
    if make.is_ours:
        assert observations == [{"episode": 2, "t": 0, "kwargs": {}}] * 3
    else:  # the action that was chosen for the last observation is applied to the new episode
        assert observations == [{"episode": 2, "t": 1, "action": 7}] * 3


@pytest.mark.covers("M-B3", "M-6/step")
def test_a_process_that_was_killed_between_two_steps(make: Maker) -> None:
    (one,) = make([Walk])
    one.reset()
    one.step(1)
    os.kill(pid_of(one), signal.SIGKILL)
    _, _, terminal, info = one.step(1)
    assert terminal is make.is_ours  # the original says nothing
    assert info.get("worker_restarted", False) is make.is_ours


@pytest.mark.covers("M-B5")
def test_a_constructor_that_raises(make: Maker) -> None:
    def broken() -> Any:
        raise RuntimeError("no simulator")

    if make.is_ours:
        with pytest.raises(StepmillError, match="no simulator"):
            make([broken])
        return
    (env,) = make([broken])  # swallowed
    with pytest.raises(ValueError, match="not initialized yet"):
        env.reset()


@pytest.mark.parametrize("is_original", [True, False])
def test_the_pages_program_runs_with_either(tmp_path: Path, is_original: bool) -> None:
    package = tmp_path / "package" / "actorcritic"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()  # the original's own imports TensorFlow
    (package / "multi_env.py").write_text((CHECKOUT / "actorcritic" / "multi_env.py").read_text())
    run_page("multi_env", tmp_path, is_original=is_original, path=str(package.parent))


class Plain:
    """An env without spaces."""

    def reset(self) -> int:
        return 1

    def step(self, action: Any) -> Any:
        return action(), 1.0, False, {}

    def close(self) -> None: ...


class Giver(Walk):
    def step(self, action: Any) -> Any:
        return (lambda: 4), 1.0, False, {}


def test_an_observation_that_only_cloudpickle_can_pickle(make: Maker) -> None:
    (env,) = make([Giver])
    env.reset()
    with contextlib.nullcontext() if make.is_ours else pytest.raises(EOFError):
        assert env.step(0)[0]() == 4


def test_arguments_that_cannot_work(make: Maker) -> None:
    for wrong in (lambda: make.module.SubprocessEnv(3), lambda: make.module.MultiEnv(make([Walk]) * 2)):
        with make.refuses():
            wrong()


def test_envs_without_spaces_and_functions_as_actions(make: Maker) -> None:
    if not make.is_ours:
        with pytest.raises(ValueError, match="not initialized"):
            assert make([Plain])[0].observation_space
        with pytest.raises(AttributeError):
            make([Walk])[0].step(lambda: 3)
    else:
        (env,) = make([Plain])
        assert (env.observation_space, env.reset(), env.step(lambda: 3)[0]) == (None, 1, 3)
