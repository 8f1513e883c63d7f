"""The table of differences of docs/switching/alf.md, each row run with ALF's classes and with ours.

A test marked `row` shows the row that begins with the text. The last test fails if a row has no test.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.spec.errors import UsageError
from tests.originals.alf import test_alf_programs, test_alf_real
from tests.originals.alf.sides import (
    BIG,
    DIE,
    HANG,
    MARKS,
    RAISE,
    Maker,
    actions,
    class_of,
    counters,
    env_class,
)
from tests.originals.either import fixture_of, raises
from tests.originals.pages import ROOT
from tests.originals.processes import check_fails, check_returns
from tests.originals.rows import ORIGINAL, OURS, Rows

pytestmark = MARKS
row = Rows("alf")
make = fixture_of(Maker)


# ---- arguments -------------------------------------------------------------------------------------------


@row("`start_serially=`")
def test_envs_are_built_at_the_same_time(whose: str) -> None:
    cls = class_of(whose)
    assert inspect.signature(cls).parameters["start_serially"].default is (whose == ORIGINAL)
    with raises(whose, ours=UsageError):
        cls(counters(1), start_serially=0).close()


@row("`start_method=`")
def test_start_methods(whose: str) -> None:
    cls = class_of(whose)
    with raises(whose, original=(KeyError, AssertionError)):
        cls(counters(1), start_method="forkserver").close()
    with raises(whose, original=AssertionError):  # ALF's processes need a conf file
        cls(counters(1), start_method="spawn").close()


@row("`torch_num_threads_per_env=`")
def test_threads_of_each_env(make: Any, whose: str) -> None:
    env = make(counters(1), torch_num_threads_per_env=1)
    before = os.environ.get("OMP_NUM_THREADS")
    assert env.envs[0].call("threads")() == (1, "1" if whose == OURS else before)


@row("Other keywords")
def test_keywords_that_alf_lacks(whose: str) -> None:
    with raises(whose, original=TypeError):
        class_of(whose)(counters(2), num_workers=1, step_timeout_s=9.0).close()


@row("`flatten`, `fast`, `num_envs`, `name` of `ProcessEnvironment`")
def test_flattened_time_steps_of_a_process_environment(whose: str) -> None:
    env = class_of(whose, "ProcessEnvironment")(counters(1)[0], env_id=0, flatten=True)
    env.start()
    assert type(env.reset()).__name__ == ("list" if whose == ORIGINAL else "TimeStep")
    env.close()


@row("`num_spare_envs_for_reload=` as large as")
def test_spares_without_an_env(whose: str) -> None:
    with raises(whose, ours=ValueError, original=AssertionError):
        class_of(whose)(counters(2), num_spare_envs_for_reload=2)


# ---- results ---------------------------------------------------------------------------------------------


@row("Memory of a TimeStep")
def test_where_the_memory_of_a_time_step_is(whose: str) -> None:
    arrays = []

    class Noted(class_of(whose)):  # type: ignore[misc]
        def _to_tensor(self, stacked: Any) -> Any:
            arrays.append(stacked.observation["count"])
            return super()._to_tensor(stacked)

    with contextlib.closing(Noted(counters(2, size=9000))) as env:
        first = env.reset().observation["count"].numpy()
        assert np.shares_memory(first, arrays[0]) is (whose == OURS)
        before = first.copy()
        env.step(actions(1, 1))
        assert first.tolist() == before.tolist()


@row("`_penv`, `_action_spec`")
def test_protected_attributes(make: Any, whose: str) -> None:
    env = make(counters(3), num_spare_envs_for_reload=1)
    assert (env._batch_size, env._num_envs, len(env._envs), len(env._spare_envs), env._closed) == (2, 3, 2, 1, False)
    assert env._spare_envs[0].call("echo", 4)() == ((4,), {})
    with raises(whose, ours=AttributeError):
        assert env._penv is not None
    with raises(whose, ours=AttributeError):
        assert env._action_spec == env.action_spec()


@row("Overriding `_receive`")
def test_replies_of_a_process_environment(whose: str) -> None:
    calls = []

    class Own(class_of(whose, "ProcessEnvironment")):  # type: ignore[misc]
        def _receive(self) -> Any:
            calls.append(1)
            return super()._receive()

    if whose == OURS:
        with pytest.raises(TypeError, match="Own overrides _receive"):
            Own(counters(1)[0])
        return
    env = Own(counters(1)[0], env_id=0)
    env.start()
    env.reset()
    env.close()
    assert calls


@row("`current_time_step()` before")
def test_the_current_time_step_before_the_first_reset(make: Any, whose: str) -> None:
    env = make(counters(1))
    assert (env.current_time_step() is None) is (whose == ORIGINAL)


@row("`step` with a NumPy action")
def test_arrays_as_actions(make: Any, whose: str) -> None:
    env = make(counters(2))
    env.reset()
    with raises(whose, original=AttributeError):
        assert env.step(np.ones(2, np.float32)).prev_action.tolist() == [1, 1]
    with raises(whose, original=RuntimeError):
        assert env.step(actions(2, 2).requires_grad_()).prev_action.tolist() == [2, 2]


@row("`step(None)`, `step` with another object")
@row("`step` with a nest of another structure")
def test_objects_that_are_no_actions(make: Any, whose: str) -> None:
    env = make(counters(2))
    env.reset()
    for wrong in (None, "text", 3, object()):
        with pytest.raises(AttributeError) as caught:
            env.step(wrong)
        assert isinstance(caught.value, RuntimeError) is (whose == OURS)
    with pytest.raises(RuntimeError):
        env.step([])
    with raises(whose, ours=RuntimeError):
        assert env.step({"a": actions(1, 1)}).prev_action.tolist() == [1, 1]


@row("`FastParallelEnvironment([])`")
def test_no_envs_and_no_threads(whose: str) -> None:
    with raises(whose, ours=UsageError, original=IndexError):
        class_of(whose)([])
    with raises(whose, ours=UsageError, original=AssertionError):
        class_of(whose)(counters(1), torch_num_threads_per_env=0)


@row("A call after `close()`")
@row("`close()`, `sync_progress()` of a")
def test_a_process_environment_before_and_after_its_life(whose: str) -> None:
    env = class_of(whose, "ProcessEnvironment")(counters(1)[0], 0)
    with raises(whose, ours=AssertionError, original=AttributeError):
        env.sync_progress()
    with raises(whose, original=AttributeError):
        env.close()
    env = class_of(whose, "ProcessEnvironment")(counters(1)[0], 0)
    env.start()
    env.close()
    with raises(whose, ours=stepmill.ClosedPoolError, original=OSError):
        env.call("draw")


@row("`step` with an action of another dtype")
def test_actions_of_another_dtype(make: Any, whose: str) -> None:
    env = make(counters(2))
    env.reset()
    found = env.step(actions(1, 1).int()).prev_action.tolist()
    assert found == ([1, 1] if whose == OURS else np.array([1, 1], np.int32).view(np.float32).tolist())


@row("`envs`")
def test_handles_are_no_process_environments(make: Any, whose: str) -> None:
    env = make(counters(1))
    assert isinstance(env.envs[0], class_of(ORIGINAL, "ProcessEnvironment")) is (whose == ORIGINAL)
    assert env.envs[0].call("echo", 1, key=2)() == ((1,), {"key": 2})


@row("`envs[i].step(...)`, `.reset()` while")
def test_a_step_of_one_env_while_all_step(make: Any, whose: str) -> None:
    env = make(counters(2))
    env.reset()
    promise = env.envs[0].step(np.float32(1), blocking=False)
    with raises(whose, ours=stepmill.BusyEnvError):
        assert env.step(actions(2, 2)).observation["count"][:, 2].tolist() == [2, 1]
    assert promise().observation["count"][2] == 1


@row("`envs[i]` with spares")
def test_handles_with_spares(make: Any, whose: str) -> None:
    env = make(counters(3, length=1), num_spare_envs_for_reload=1)
    env.reset()
    env.step(actions(1, 1))  # both episodes end
    observed = env.step(actions(1, 1)).observation["count"][:, 0].tolist()
    asked = [handle.made_with for handle in env.envs]
    assert observed == [2, 0]
    assert (asked == observed) is (whose == OURS)


@row("`call(...)` returns a promise")
def test_promises_in_another_order(make: Any, whose: str) -> None:
    env = make(counters(1))
    first, second = (env.envs[0].call("echo", number) for number in (1, 2))
    assert [second()[0], first()[0]] == ([(2,), (1,)] if whose == OURS else [(1,), (2,)])


@row("A large argument and a large result")
def test_large_arguments_and_results(whose: str) -> None:
    def call() -> None:
        env = class_of(whose)(counters(1))
        promises = [env.envs[0].call("make_big", bytes(BIG)) for _ in range(2)]
        assert len(promises[0]()) == 2 * BIG

    check_returns(call, whose == OURS)


@row("`call_envs_with_same_args`")
def test_calls_of_all_envs(make: Any, whose: str, tmp_path: Path) -> None:
    env = make(counters(2))
    assert env.call_envs_with_same_args("meet", str(tmp_path), 2) == ([2, 2] if whose == OURS else [1, 2])


row("`BatchEnvironmentWrapper`: specs")(test_alf_real.test_the_signatures_are_alfs_but_for_what_the_page_says)


row("A list of constructors that is")(test_alf_programs.test_constructors_from_an_iterator)
row("A TimeStep of an env that does not")(test_alf_programs.test_time_steps_of_another_form_than_the_specs)
row("Dicts in TimeSteps")(test_alf_programs.test_dicts_of_time_steps)
row("`envs[i].step` with a number")(test_alf_programs.test_numbers_as_actions_of_one_env_and_its_methods_as_attributes)
row("A method as an attribute")(test_alf_programs.test_numbers_as_actions_of_one_env_and_its_methods_as_attributes)
row("`env_id` of `envs[i].step(...)`")(test_alf_programs.test_env_ids_of_one_batched_env)


@row("`sync_progress`")
def test_progress_of_spares(make: Any, whose: str) -> None:
    schedulers = importlib.import_module("alf.utils.schedulers")
    schedulers.update_progress("global_counter", 3)
    env = make(counters(3, length=1), num_spare_envs_for_reload=1)
    schedulers.update_progress("global_counter", 7)
    env.sync_progress()
    assert [handle.call("progress")() for handle in env._spare_envs] == [7 if whose == OURS else 3]
    with raises(whose, original=TypeError):
        env.sync_progress(progress={"global_counter": 8})


@row("Spares beside batched envs")
def test_spares_of_batched_envs(whose: str) -> None:
    wrapper = class_of(whose, "BatchEnvironmentWrapper")

    def construct(env_id: int) -> Any:
        return wrapper([env_class()(env_id) for _ in range(2)])

    with raises(whose, ours=RuntimeError, original=RuntimeError):
        class_of(whose)([construct] * 2, num_spare_envs_for_reload=1)


@row("`create_environment(batch_size_per_env=2")
def test_create_environment_with_several_envs_per_process(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = importlib.import_module("alf.environments.utils")

    def create() -> Any:
        return utils.create_environment(
            "count",
            lambda name, env_id=None: env_class()(env_id),
            num_parallel_environments=4,
            batch_size_per_env=2,
            parallel_environment_ctor=class_of(whose),
        )

    if whose == OURS:
        with pytest.raises(AssertionError):
            create()
        module = importlib.import_module("alf.environments.fast_parallel_environment")
        monkeypatch.setattr(module, "FastParallelEnvironment", class_of(OURS))
    env = create()
    assert env.reset().observation["count"].shape == (4, 4)
    env.close()


# ---- exceptions, and the end -------------------------------------------------------------------------------


@row("An env raises in `step`")
def test_envs_that_raise(make: Any, whose: str) -> None:
    def fail() -> Any:
        env = make(counters(2))
        env.reset()
        with contextlib.suppress(RuntimeError):
            env.step(actions(1, RAISE))
        return [env.reset() for _ in range(20)]  # the first may come before the process has ended

    if whose == ORIGINAL:
        check_fails(fail)
    else:
        assert fail()[0].step_type.tolist() == [0, 0]


@row("`envs[i]`: an attribute")
@pytest.mark.parametrize("ask", [lambda handle: handle.absent, lambda handle: handle.call("act_out", RAISE)()])
def test_calls_of_one_env_that_fail(make: Any, whose: str, ask: Any) -> None:
    handle = make(counters(1)).envs[0]
    with pytest.raises((AttributeError, RuntimeError) if whose == OURS else EOFError):
        ask(handle)
    if whose == OURS:
        assert handle.call("echo", 1)() == ((1,), {})


@row("A process dies")
@row("An env does not return")
@pytest.mark.parametrize("action", [DIE, HANG])
def test_envs_that_die_or_hang(whose: str, action: float) -> None:
    own: dict[str, Any] = {"step_timeout_s": 0.5} if whose == OURS else {}

    def fail() -> None:
        env = class_of(whose)(counters(2), **own)
        env.reset()
        env.step(actions(1, action))

    check_returns(fail, whose == OURS)


@row("A constructor raises")
def test_constructors_that_raise(whose: str) -> None:
    def construct(env_id: int) -> Any:
        raise LookupError("cannot be built")

    with pytest.raises(RuntimeError if whose == OURS else AssertionError) as caught:
        class_of(whose)([construct])
    assert ("env 0" in str(caught.value)) is (whose == OURS)


@row("An unknown start method")
def test_unknown_start_methods(whose: str) -> None:
    with raises(whose, ours=AssertionError, original=(KeyError, AssertionError)):
        class_of(whose)(counters(1), start_method="thread")


@row("Envs with different specs")
@pytest.mark.parametrize("num_spares", [0, 1])
def test_envs_with_different_specs(whose: str, num_spares: int) -> None:
    constructors = [*counters(1), *counters(1, size=5)]
    is_compared = whose == OURS or not num_spares
    with (
        pytest.raises(ValueError, match="Env 1" if whose == OURS else "same")
        if is_compared
        else contextlib.nullcontext()
    ):
        class_of(whose)(constructors, num_spare_envs_for_reload=num_spares).close()


@row("`close()`")
def test_envs_that_do_not_close(whose: str) -> None:
    check_returns(lambda: class_of(whose)(counters(2, closes=False)).close(), whose == OURS)


KILLED = """
import os, signal
from tests.originals.alf.sides import class_of, counters
env = class_of(WHOSE)(counters(2))
env.reset()
os.kill(os.getpid(), signal.SIGKILL)
"""


@row("After `SIGKILL` of the learner")
def test_a_learner_that_is_killed(whose: str) -> None:
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", KILLED.replace("WHOSE", repr(whose))]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as learner:
        assert learner.wait() == -signal.SIGKILL
    # Other tests may run at the same time, so only the learner's own count.
    left = [name for name in os.listdir("/dev/shm") if str(learner.pid) in name]
    for name in left:
        Path("/dev/shm", name).unlink()
    assert bool(left) is (whose == ORIGINAL)


def test_each_row_of_the_page_has_a_program() -> None:
    row.check(Path(__file__).parent)
