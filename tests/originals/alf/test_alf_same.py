"""What docs/switching/alf.md lists as the same: programs that give the same results with ALF's classes and with ours."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from stepmill.frontends.alf import BatchEnvironmentWrapper
from tests.originals.alf.sides import MARKS, Maker, actions, class_of, counters, env_class, plain
from tests.originals.either import assert_same_with_either
from tests.originals.rows import ORIGINAL, OURS

pytestmark = MARKS
Make = Callable[..., Any]


def episodes(make: Make, **own: Any) -> Any:
    """Step seven times: constructors' env_id, nests, LAST and FIRST, whose action is ignored."""
    env = make(counters(4, **own), num_spare_envs_for_reload=2)
    found = [plain(env.reset()), *(plain(env.step(actions(step, step + 0.5))) for step in range(7))]
    return [
        *found,
        plain(env.reset()),
        plain(env.current_time_step()),
        env.batch_size,
        env.batched,
        env.is_tensor_based,
    ]


def without_a_reset(make: Make) -> Any:
    env = make(counters(2))
    return plain(env.step(actions(1, 1)))


def batched(make: Make) -> Any:
    """Envs that own several slots each."""

    def construct(env_id: int) -> Any:
        return BatchEnvironmentWrapper([env_class()(env_id, length=2 + slot) for slot in range(2)])

    env = make([construct] * 2)
    return [plain(env.reset()), [plain(env.step(actions(*range(4)))) for _ in range(5)], env.batch_size]


def handles(make: Make) -> Any:
    env = make(counters(2))
    handle = env.envs[1]
    found = [handle.reset(), handle.step(np.float32(2)), handle.step(np.float32(3), blocking=False)()]
    found = [(time_step.observation["count"].tolist(), int(time_step.step_type)) for time_step in found]
    promise = handle.call("echo", 1, key=[2])
    rest = [promise(), handle.made_with, handle.length, handle.render("rgb_array").tolist(), handle.metadata]
    steps = [*env.call_envs_with_same_args("reset"), *env.call_envs_with_same_args("step", 2.0)]
    return [found, rest, [time_step.observation["count"].tolist() for time_step in steps]]


def of_all_envs(make: Make) -> Any:
    schedulers = importlib.import_module("alf.utils.schedulers")
    schedulers.update_progress("global_counter", 2)
    env = make(counters(3), num_spare_envs_for_reload=1)
    found = [env.seed([1, 2, 3]), env.call_envs_with_same_args("draw"), env.render("human").tolist(), env.metadata]
    schedulers.update_progress("global_counter", 5)
    found.append(env.call_envs_with_same_args("progress"))
    env.sync_progress()
    found += [env.call_envs_with_same_args("progress"), env.num_tasks, env.task_names, env.num_spare_envs_for_reload]
    with pytest.raises(ValueError, match="Number of seeds should match"):
        env.seed([1])
    with pytest.raises(AssertionError):
        env.start()
    specs = (env.action_spec(), env.observation_spec(), env.reward_spec(), env.time_step_spec(), env.env_info_spec())
    return [*found, *map(str, specs)]


def subclasses(make: Make) -> Any:
    calls: list[str] = []

    class Own(class_of(make.whose)):  # type: ignore[attr-defined, misc]
        def start(self) -> None:
            calls.append("start")
            super().start()

        def _reset(self) -> Any:
            calls.append("_reset")
            return super()._reset()

        def _step(self, action: Any) -> Any:
            calls.append("_step")
            return super()._step(action)

        def _to_tensor(self, stacked: Any) -> Any:
            calls.append(f"_to_tensor {type(stacked.reward).__name__}")
            return (
                super()
                ._to_tensor(stacked)
                ._replace(reward=importlib.import_module("torch").as_tensor(stacked.reward) * 2)
            )

    env = make(counters(2), cls=Own)
    found = [plain(env.reset()), plain(env.step(actions(1, 2))), plain(env.step(actions(1, 2)))]
    original = importlib.import_module("alf.environments.fast_parallel_environment").FastParallelEnvironment
    base = importlib.import_module("alf.environments.alf_environment").AlfEnvironment
    return [found, calls, isinstance(env, original), isinstance(env, base)]


def different_specs(make: Make) -> Any:
    with pytest.raises(ValueError, match="same"):
        make([*counters(1), *counters(1, size=5)])


def created(make: Make) -> Any:
    """`create_environment` with wrappers, and a wrapper of the whole env."""
    utils = importlib.import_module("alf.environments.utils")
    wrappers = importlib.import_module("alf.environments.alf_wrappers")

    def load(env_name: str, env_id: int | None = None) -> Any:
        return wrappers.TimeLimit(env_class()(env_id, length=9), 2)

    env = utils.create_environment(
        "count", load, num_parallel_environments=2, seed=3, parallel_environment_ctor=make, start_serially=False
    )
    return [plain(env.reset()), [plain(env.step(actions(1, 2))) for _ in range(4)]]


def process_environment(make: Any) -> Any:
    env = make.keep(class_of(make.whose, "ProcessEnvironment")(counters(1)[0], env_id=4))
    with pytest.raises(AssertionError):
        env.reset()
    env.start(wait_to_start=False)
    env.wait_start()
    found = [env.reset(), env.step(np.float32(1)), env.step(np.float32(2), blocking=False)()]
    found = [(type(step).__name__, step.observation["count"].tolist(), type(step.reward).__name__) for step in found]
    rest = [env.call("echo", 3)(), env.made_with, env.render("human").tolist(), str(env.observation_spec())]
    return [found, rest]


SAME = [episodes, partial(episodes, length=1), without_a_reset, batched, handles, of_all_envs, subclasses, created]
SAME += [different_specs, process_environment]


@pytest.mark.covers("A-27/time_step")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", SAME, ids=lambda program: getattr(program, "__name__", "short_episodes"))
def test_this_program_gives_the_same_with_either(program: Callable[[Any], Any]) -> None:
    assert_same_with_either(program, Maker)


def test_log_lines_are_alfs(caplog: pytest.LogCaptureFixture) -> None:
    absl = importlib.import_module("absl.logging")
    found = []
    for whose in (ORIGINAL, OURS):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            absl.get_absl_logger().addHandler(caplog.handler)
            absl.set_verbosity(absl.INFO)
            class_of(whose)(counters(2), start_serially=False).close()
            absl.get_absl_logger().removeHandler(caplog.handler)
        found.append(list(dict.fromkeys(caplog.messages)))
    assert found[0] == found[1]
