"""The same program with actorcritic's own classes and with ours: what is the same, and the faults that ours does not have."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepmill.frontends import multi_env
from stepmill.spec.errors import StepmillError, UsageError
from tests.originals.multi_env.sides import CHECKOUT, MARKS, Maker, Walk, load_original, pid_of
from tests.originals.pages import run_page
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = MARKS


@pytest.fixture(params=["original", "ours"])
def module(request: pytest.FixtureRequest) -> Any:
    """The module that has the classes under test."""
    return multi_env if request.param == "ours" else load_original()


@pytest.fixture
def envs(module: Any) -> Iterator[Any]:
    """Three envs in a MultiEnv."""
    made = module.MultiEnv(module.create_subprocess_envs([Walk] * 3))
    yield made
    made.close()


@pytest.fixture
def one(module: Any) -> Iterator[Any]:
    """One env, started and initialized."""
    env = module.SubprocessEnv(Walk)
    env.start()
    env.initialize()
    yield env
    env.close()


# "CLASS.METHOD(PARAMETER): how it differs", and words of the row of the page that says so.
DIFFERENCES: dict[str, str] = {}


@pytest.mark.covers("M-1")
def test_the_signatures_are_actorcritics_but_for_what_the_page_says() -> None:
    original, found = load_original(), []
    for name in ("MultiEnv", "SubprocessEnv", "create_subprocess_envs"):
        found += [f"{name}.{each}" for each in differences(getattr(multi_env, name), getattr(original, name))]
    check_listed("multi_env", found, DIFFERENCES)


@pytest.mark.covers("M-12")
def test_protected_methods_that_take_no_effect_are_refused_and_named_by_the_page() -> None:
    check_protected("multi_env", [(multi_env.SubprocessEnv, load_original().SubprocessEnv)])


@pytest.mark.covers("M-1", "M-7", "M-8", "G-16/multi_env", "G-20/skipping")
def test_lists_and_skipped_envs(envs: Any) -> None:
    assert (envs.observation_space, envs.action_space) == ("observations", "actions")
    assert envs.reset() == [{"episode": 1, "t": 0, "kwargs": {}}] * 3
    observations, rewards, terminals, infos = envs.step([1, None, (2, "x")])
    assert observations == [{"episode": 1, "t": 1, "action": 1}, None, {"episode": 1, "t": 1, "action": (2, "x")}]
    assert (rewards, terminals, infos) == ([1.0, None, 1.0], [False, None, False], [{"t": 1}, None, {"t": 1}])


@pytest.mark.covers("M-5")
def test_one_env_returns_what_the_env_returns(one: Any) -> None:
    assert one.reset(level=3) == {"episode": 1, "t": 0, "kwargs": {"level": 3}}
    assert one.step(5) == ({"episode": 1, "t": 1, "action": 5}, 1.0, False, {"t": 1})
    assert one.render(None) == one.render()
    assert (one.render(), one.render("human"), one.render(mode="rgb_array")) == (
        ["human", 1],
        ["human", 1],
        ["rgb_array", 1],
    )


@pytest.mark.covers("M-3")
def test_uses_out_of_turn_have_the_same_words() -> None:
    texts = []
    for module in (load_original(), multi_env):
        env = module.SubprocessEnv(Walk)
        uses = [
            env.initialize,
            lambda env=env: env.step(1),
            env.reset,
            env.render,
            lambda env=env: env.observation_space,
            lambda env=env: env.action_space,
        ]
        found = [_error_of(use) for use in uses]
        env.start()
        found += [_error_of(use) for use in uses[1:]]
        env.close()
        found += [_error_of(use) for use in (env.start, *uses)]
        texts.append(found)
    assert texts[0] == texts[1]


def _error_of(use: Any) -> str:
    with pytest.raises(ValueError) as caught:
        use()
    return str(caught.value)


@pytest.mark.covers("M-9", "M-B2")
def test_the_first_observation_after_the_end(envs: Any, module: Any) -> None:
    envs.reset()
    for _ in range(3):
        terminals = envs.step([1, 1, 1])[2]
    assert terminals == [True] * 3
    observations = envs.step([7, 7, 7])[0]
    if module is multi_env:
        assert observations == [{"episode": 2, "t": 0, "kwargs": {}}] * 3
    else:  # the action that was chosen for the last observation is applied to the new episode
        assert observations == [{"episode": 2, "t": 1, "action": 7}] * 3


@pytest.mark.covers("M-B3", "M-6/step")
def test_a_process_that_was_killed_between_two_steps(one: Any, module: Any) -> None:
    one.reset()
    one.step(1)
    os.kill(pid_of(one), signal.SIGKILL)
    _, _, terminal, info = one.step(1)
    assert terminal is (module is multi_env)  # the original says nothing
    assert info.get("worker_restarted", False) is (module is multi_env)


@pytest.mark.covers("M-B4", "M-B6")
def test_an_action_that_always_kills_and_one_that_raises(one: Any, module: Any) -> None:
    one.reset()
    if module is multi_env:
        assert one.step("die")[2] is True
        one.step(1)
        with pytest.raises(StepmillError, match="on purpose"):
            one.step("raise")
    else:
        with pytest.raises(EOFError):
            one.step("die")


@pytest.mark.covers("M-B5")
def test_a_constructor_that_raises(module: Any) -> None:
    def broken() -> Any:
        raise RuntimeError("no simulator")

    if module is multi_env:
        with pytest.raises(StepmillError, match="no simulator"):
            module.create_subprocess_envs([broken])
        return
    (env,) = module.create_subprocess_envs([broken])  # swallowed
    with pytest.raises(ValueError, match="not initialized yet"):
        env.reset()
    env.close()


@pytest.mark.covers("M-1")
def test_envs_are_built_at_the_same_time(module: Any, tmp_path: Path) -> None:
    def slow(number: int) -> Any:
        (tmp_path / f"{number}").touch()
        while len(list(tmp_path.iterdir())) < 3:  # waits for the other constructors: one after the other never ends
            time.sleep(0.01)
        return Walk()

    envs = module.create_subprocess_envs([lambda number=number: slow(number) for number in range(3)])
    assert [env.action_space for env in envs] == ["actions"] * 3
    for env in envs:
        env.close()


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


def test_an_observation_that_only_cloudpickle_can_pickle(module: Any) -> None:
    make = Maker(module)
    (env,) = make([Giver])
    env.reset()
    with contextlib.nullcontext() if make.is_ours else pytest.raises(EOFError):
        assert env.step(0)[0]() == 4
    make.close()


def test_arguments_that_cannot_work(module: Any) -> None:
    make = Maker(module)
    for wrong in (lambda: make.module.SubprocessEnv(3), lambda: make.module.MultiEnv(make([Walk]) * 2)):
        with pytest.raises(UsageError) if make.is_ours else contextlib.nullcontext():
            wrong()
    make.close()


def test_envs_without_spaces_and_functions_as_actions(module: Any) -> None:
    make = Maker(module)
    if not make.is_ours:
        with pytest.raises(ValueError, match="not initialized"):
            assert make([Plain])[0].observation_space
        with pytest.raises(AttributeError):
            make([Walk])[0].step(lambda: 3)
    else:
        (env,) = make([Plain])
        assert (env.observation_space, env.reset(), env.step(lambda: 3)[0]) == (None, 1, 3)
    make.close()
