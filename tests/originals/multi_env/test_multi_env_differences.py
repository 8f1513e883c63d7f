"""The page docs/switching/multi_env.md, run with actorcritic's classes and with ours: the rows of its table, and what is the same."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from stepmill.spec.errors import EnvError, UsageError, WorkerDied
from stepmill.testing.gates import Gate, wait_at
from tests.originals.di_engine.sides import Never, interrupted
from tests.originals.either import assert_same_with_either, fixture_of
from tests.originals.multi_env import test_actorcritic
from tests.originals.multi_env.sides import MARKS, Maker, Walk, pid_of
from tests.originals.rows import Rows

pytestmark = MARKS
row = Rows("multi_env")
make = fixture_of(Maker)


# ---- arguments -------------------------------------------------------------------------------------------


@row("`SubprocessEnv`, `create_subprocess_envs`")
def test_options_of_the_pool(make: Maker) -> None:
    with make.only_ours():
        make.module.SubprocessEnv(Walk, options=None, restarts={"max_restarts": 2})
    with make.only_ours():
        (env,) = make.module.create_subprocess_envs([Walk], context="fork")
        env.close()


@row("`create_subprocess_envs([])`")
def test_no_envs(make: Maker) -> None:
    with make.only_ours(ValueError):
        assert make([]) == []


class Other(Walk):
    """Has another action space."""

    action_space = "other actions"


row("An `env_fn` that is not a function")(test_actorcritic.test_arguments_that_cannot_work)
row("An env without spaces")(test_actorcritic.test_envs_without_spaces_and_functions_as_actions)
row("Functions that are defined")(test_actorcritic.test_envs_without_spaces_and_functions_as_actions)


@row("`MultiEnv(envs)`")
def test_envs_with_other_spaces(make: Maker) -> None:
    if not make.is_ours:
        assert make.multi([Walk, Other]).action_space == "actions"
        return
    with pytest.raises(UsageError, match="env 1 has another action space"):
        make.multi([Walk, Other])
    made = make.module.MultiEnv(make([Walk, Other]), check_spaces=False, step_api="gymnasium")
    made.reset()
    assert len(made.step([1, 1])) == 5


@row("`MultiEnv.reset()`")
def test_some_envs_are_reset(make: Maker) -> None:
    made = make.multi([Walk] * 2)
    made.reset()
    with make.only_ours():
        assert made.reset(env_ids=[1], kwargs=[{"level": 2}]) == [{"episode": 2, "t": 0, "kwargs": {"level": 2}}]


@row("`MultiEnv.step(actions)`")
def test_another_number_of_actions(make: Maker) -> None:
    made = make.multi([Walk] * 2)
    made.reset()
    if not make.is_ours:
        assert made.step([1])[1] == [1.0]
        return
    with pytest.raises(UsageError, match="got 1 actions for 2 envs"):
        made.step([1])


@row("Start of processes")
def test_what_envs_inherit_from_this_process(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_actorcritic, "STARTED_HERE", True, raising=False)
    (env,) = make([Inherits], context="forkserver")
    assert env.reset() is not make.is_ours


class Inherits(Walk):
    """Its observation is whether this process's changes of a module are there."""

    def reset(self, **kwargs: Any) -> Any:
        return getattr(test_actorcritic, "STARTED_HERE", False)


@row("Overriding ")
@pytest.mark.parametrize("name", ["_reset", "_communicate", "_unsafe_communicate", "_child_worker"])
def test_these_methods_may_not_be_overridden(make: Maker, name: str) -> None:
    calls = []

    def own(self: Any, *args: Any) -> Any:
        calls.append(1)
        return getattr(make.module.SubprocessEnv, name)(self, *args)

    sub = type("Own", (make.module.SubprocessEnv,), {name: own})
    if make.is_ours:
        with pytest.raises(TypeError, match=f"Own overrides {name}"):
            sub(Walk)
        return
    make.made.append(sub(Walk))
    make.made[0].start()
    make.made[0].initialize()
    assert calls or name == "_child_worker"  # which is called in the process, and by its class


class Seeded(Walk):
    """Its observation is its seed."""

    seen = None

    def seed(self, seed: Any) -> None:
        self.seen = seed

    def reset(self, **kwargs: Any) -> Any:
        return self.seen


@row("`seed(s)` of a `SubprocessEnv`")
def test_seeds(make: Maker) -> None:
    (env,) = make([Seeded])
    env.seed(5)
    assert env.reset() == (5 if make.is_ours else None)


@row("`_process`, `_parent_connection`")
def test_private_parts(make: Maker) -> None:
    made = make.multi([Walk])
    env = make.made[0]
    parts = [hasattr(env, "_process"), hasattr(env, "_parent_connection"), hasattr(made, "_executor")]
    assert parts == [not make.is_ours] * 3
    assert pid_of(env) != os.getpid()


# ---- results ---------------------------------------------------------------------------------------------


@row("`MultiEnv.envs`")
def test_the_envs_of_a_multi_env(make: Maker) -> None:
    assert (make.multi([Walk] * 2).envs == make.made) is make.is_ours


class NoteThread(Walk):
    """Its observation is its thread."""

    def step(self, action: Any) -> Any:
        return threading.get_ident(), 0.0, False, {}


@row("Envs of this process")
def test_envs_of_this_process_are_stepped_in_turn(make: Maker) -> None:
    import gym  # type: ignore[import-not-found]

    cls = type("NoteThread", (NoteThread, gym.Env), {})
    made = make.module.MultiEnv([cls(), cls()])
    made.reset()
    assert ({*made.step([1, 1])[0]} == {threading.get_ident()}) is make.is_ours


row("The step after a terminal one")(test_actorcritic.test_the_first_observation_after_the_end)
row("A process that dies between or in steps")(test_actorcritic.test_a_process_that_was_killed_between_two_steps)


@row("`reward_range`, `metadata`, `spec`")
def test_attributes_of_the_env(make: Maker) -> None:
    (env,) = make([Walk])
    assert (tuple(env.reward_range) == Walk.reward_range) is make.is_ours


class Limited(Walk):
    """Five values; the first step is the last by a time limit."""

    def reset(self, *, seed: Any = None, **kwargs: Any) -> Any:
        return super().reset(), {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, True, {}


@row("A time limit of an env with five values")
def test_time_limits(make: Maker) -> None:
    made = make.multi([Limited])
    made.reset()
    if not make.is_ours:
        with pytest.raises(ValueError, match="too many values to unpack"):
            made.step([1])
        return
    assert made.step([1])[2:] == ([True], [{"TimeLimit.truncated": True}])


# ---- exceptions ------------------------------------------------------------------------------------------


@row("`step` before the first `reset`")
def test_a_step_before_the_first_reset(make: Maker) -> None:
    class Ready(Walk):
        t = 0
        episode = 0

    made = make.multi([Ready])
    with pytest.raises(UsageError, match="call reset") if make.is_ours else contextlib.nullcontext():
        made.step([1])


@row("An env raises")
def test_an_env_that_raises(make: Maker) -> None:
    made = make.multi([Walk] * 2)
    made.reset()
    before = pid_of(make.made[1])
    with pytest.raises(EnvError if make.is_ours else EOFError):
        made.step([1, "raise"])
    assert (pid_of(make.made[1]) == before) is make.is_ours


@row("A process dies again and again")
def test_a_process_that_dies_again_and_again(make: Maker) -> None:
    (env,) = make([Walk], restarts={"max_restarts": 1})
    env.reset()
    if make.is_ours:
        assert env.step("die")[2] is True
        env.step(1)
    with pytest.raises(WorkerDied if make.is_ours else EOFError):
        env.step("die")


class DiesInRender(Walk):
    """Dies in its first frame, in whatever process."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def render(self, mode: str = "human") -> Any:
        if not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().render(mode)


@row("A process dies in `render`")
def test_a_death_in_render(make: Maker, tmp_path: Path) -> None:
    (env,) = make([partial(DiesInRender, tmp_path / "flag")])
    env.reset()
    env.step(1)
    if not make.is_ours:
        assert env.render() == ["human", 0]
        return
    with pytest.raises(WorkerDied):
        env.render()
    assert env.step(1)[2] is True


row("A constructor raises")(test_actorcritic.test_a_constructor_that_raises)


@row("Ctrl-C")
def test_an_interrupt_of_the_processes(make: Maker) -> None:
    """A terminal sends Ctrl-C to all processes; this sends it to that of the env, which has ended, or has not, when it is stepped."""
    (env,) = make([Walk])
    env.reset()
    before = pid_of(env)
    os.kill(before, signal.SIGINT)
    if not make.is_ours:
        env._process.join()
    env.step(1)
    assert (pid_of(env) == before) is make.is_ours


class NeverCloses(Walk):
    """Waits at a gate when it is closed."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def close(self) -> None:
        wait_at(Path(self.gate))


@row("`close()` a second time")
def test_close_a_second_time(make: Maker) -> None:
    (env,) = make([Walk])
    env.close()
    with make.only_ours(ValueError):
        env.close()


@row("`close()` of an env that was not started")
def test_close_of_an_env_that_was_not_started(make: Maker) -> None:
    env = make.module.SubprocessEnv(Walk)
    with make.only_ours(AssertionError):
        env.close()


@row("`close()` of an env that does not return")
def test_an_env_that_never_closes(make: Maker) -> None:
    with Gate() as gate:
        (env,) = make([partial(NeverCloses, str(gate.path))])
        if make.is_ours:
            with pytest.warns(RuntimeWarning, match="it was killed"):
                env.close()
        else:
            with pytest.raises(Never), interrupted():
                env.close()
            gate.open()


class BreaksAtClose(Walk):
    """Raises when it is closed."""

    def close(self) -> None:
        raise RuntimeError("the simulator is gone")


@row("An env raises in `close()`")
@pytest.mark.parametrize("count", [1, 2])
def test_an_env_that_raises_in_close(make: Maker, count: int) -> None:
    env, *others = make([BreaksAtClose, Walk][:count])
    with pytest.warns(RuntimeWarning, match="the simulator is gone") if make.is_ours else contextlib.nullcontext():
        env.close()
    assert [other.reset()["t"] for other in others] == [0] * len(others)


def test_each_row_of_the_page_has_a_program() -> None:
    row.check(Path(__file__).parent)


# ---- the same ---------------------------------------------------------------------------------------------


def frames_of_gym(make: Maker) -> Any:
    import gym

    (env,) = make([type("Own", (Walk, gym.Env), {"render": lambda self, mode="human": mode})])
    return [env.render(), env.render("rgb_array"), env.render(mode="ansi")]


def five_values(make: Maker) -> Any:
    (env,) = make([Limited])
    return [env.reset(), env.step(1)]


def of_gymnasium(make: Maker) -> Any:
    """Run one of Gymnasium's envs."""
    (env,) = make([partial(gymnasium.make, "CartPole-v1")])
    first, info = env.reset(seed=3)
    found = [first.tolist(), info, env.action_space, env.observation_space]
    for action in (0, 1, 0):
        obs, *rest = env.step(action)
        found.append([obs.tolist(), type(obs), obs.dtype, *rest])
    return found


def checks_extended(make: Maker) -> Any:
    calls: list[str] = []

    class Own(make.module.SubprocessEnv):  # type: ignore[misc,name-defined]
        def _check_closed(self) -> None:
            calls.append("closed")
            super()._check_closed()

        def _check_initialized(self, method: str) -> None:
            calls.append(method)
            super()._check_initialized(method)

    env = Own(Walk)
    make.made.append(env)
    env.start()
    env.initialize()
    env.reset()
    env.step(1)
    return sorted({*calls})


def closed(make: Maker) -> Any:
    """Use a MultiEnv that is closed, and assign one of its spaces."""
    made = make.multi([Walk] * 2)
    made.close()
    calls = (made.reset, lambda: made.step([1, 1]), lambda: made.action_space, lambda: setattr(made, "action_space", 1))
    for call, error in zip(calls, (RuntimeError, RuntimeError, ValueError, AttributeError), strict=True):
        with pytest.raises(error):
            call()


SAME = (closed, frames_of_gym, five_values, of_gymnasium, checks_extended)


@pytest.mark.covers("M-5", "M-12")
@pytest.mark.parametrize("program", SAME, ids=lambda program: str(program.__name__))
def test_this_program_gives_the_same_with_either(program: Callable[[Maker], Any]) -> None:
    assert_same_with_either(program, Maker)
