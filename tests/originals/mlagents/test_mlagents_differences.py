"""The table of differences of docs/switching/mlagents.md, each row run with ML-Agents' classes and with ours.

A test marked `row` shows the row that begins with the text. The last test fails if a row has no test.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.frontends.mlagents import EngineConfig, EnvironmentCommand, UnityCommunicationException
from stepmill.testing.gates import Gate, wait_at
from tests.frontends.mlagents.parts import BatchPolicy, Policy, deciding, die, once, raise_, wait
from tests.originals.either import fixture_of, raises
from tests.originals.mlagents import test_mlagents_programs, test_mlagents_trainers
from tests.originals.mlagents.sides import (
    MANAGER,
    MARKS,
    Env,
    Maker,
    class_of,
    constant,
    only_first,
    scripted,
    speed_message,
    started,
    step_until,
)
from tests.originals.pages import ROOT
from tests.originals.processes import check_fails, check_returns
from tests.originals.rows import ORIGINAL, OURS, Rows

pytestmark = MARKS
row = Rows("mlagents")
make = fixture_of(Maker)


# ---- arguments -------------------------------------------------------------------------------------------


@row("`SubprocessEnvManager(env_factory, run_options")
@pytest.mark.parametrize("options", [(), (None,), (EngineConfig(),)])
def test_run_options_may_be_left_out(whose: str, options: Any) -> None:
    with raises(whose, original=(TypeError, OSError)):
        manager = class_of(whose)(scripted(), *options)
        try:
            manager.reset({})
        finally:
            manager.close()


@row("`EnvironmentStep(...)`, `StepResponse(...)`")
def test_steps_of_three_values(whose: str) -> None:
    with raises(whose, original=TypeError):
        class_of(whose, "StepResponse")({}, None)
    cls = class_of(whose, "EnvironmentStep")
    with raises(whose, original=TypeError):
        cls({}, 0, {})
    assert isinstance(cls({}, 0, {}, {}), class_of(ORIGINAL, "EnvironmentStep")) is (whose == ORIGINAL)


@row("The constructor")
def test_when_the_constructor_returns(make: Any, whose: str) -> None:
    with Gate() as gate:

        def factory(worker_id: int, side_channels: Any) -> Any:
            wait_at(gate.path)
            return Env()

        helper = threading.Thread(target=lambda: (gate.wait_arrivals(2), gate.open(2)))
        if whose == OURS:
            helper.start()
        make(factory, 2)
        if whose == ORIGINAL:
            helper.start()
        helper.join()


def fail(worker_id: int, side_channels: Any) -> Any:
    raise LookupError("no player")


@row("`n_env` below 1")
def test_no_workers(make: Any, whose: str) -> None:
    with raises(whose, ours=ValueError):
        make(scripted(), 0)


@row("A policy that is None; no policy")
@row("A policy that returns None")
def test_policies_that_are_none(make: Any, whose: str) -> None:
    manager, _ = started(make, scripted())
    policy = manager.policies["walk"]
    manager.set_policy("walk", None)
    with raises(whose, original=AttributeError):
        manager.get_steps()
    manager.set_policy("walk", Nothing())
    with pytest.raises((AttributeError, TypeError)):
        manager.get_steps()
    manager.set_policy("walk", policy)
    with raises(whose, original=UnityCommunicationException):
        manager.get_steps()


class Nothing:
    """A policy that returns nothing."""

    def get_action(self, *args: Any) -> None: ...


@row("`env_factory`")
def test_the_arguments_and_channels_of_factories(make: Any, whose: str, tmp_path: Path) -> None:
    def factory(worker_id: int, side_channels: Any, seed: int | None = None) -> Any:
        names = [type(each).__name__ for each in side_channels]
        (tmp_path / str(worker_id)).write_text(f"{seed} {' '.join(names)}")
        return Env()

    make(factory, 2, seed=7).reset({})
    seeds, names = zip(*((tmp_path / str(i)).read_text().split(" ", 1) for i in range(2)), strict=True)
    standard = "EnvironmentParametersChannel EngineConfigurationChannel StatsSideChannel"
    assert seeds == (("7", "8") if whose == OURS else ("None", "None"))
    assert names == (standard if whose == OURS else f"{standard} TrainingAnalyticsSideChannel", standard)


FLAG = [0]


def read_flag(worker_id: int, side_channels: Any) -> Any:
    from tests.originals.mlagents import test_mlagents_differences as module

    return Env({"walk": [[1] * (1 + module.FLAG[0])]})


@row("Start of processes")
def test_how_processes_start(make: Any, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.FLAG", [1])
    manager = make.reset(read_flag, **({"context": "forkserver"} if whose == OURS else {}))
    assert len(deciding(manager.first_step_infos[0])) == (1 if whose == OURS else 2)


@row("`reset(config)`, `set_env_parameters(config)`")
def test_no_config(make: Any, whose: str) -> None:
    manager = make(scripted())
    with raises(whose, original=AttributeError):
        manager.reset()


@row("Numbers in `config`")
@row("Other values in `config`")
def test_values_in_configs(make: Any, whose: str) -> None:
    manager = make(scripted())
    manager.reset({})  # has the engine's settings, too
    sizes = []
    for config in ({}, {"wind": 2.0}, {"wind": constant(2.0)}):
        manager.reset(config)
        sizes.append(float(manager.first_step_infos[0].current_all_step_result["walk"][0].reward[0]))
    assert [size > sizes[0] for size in sizes[1:]] == [whose == OURS, True]
    with raises(whose, ours=stepmill.UsageError):
        manager.reset({"wind": "strong"})


@row("`env_parameters`")
def test_env_parameters_that_are_kept(make: Any, whose: str) -> None:
    manager = make(scripted())
    wind, rain = constant(1.0), constant(2.0)
    manager.reset({"wind": wind})
    manager.set_env_parameters({"rain": rain})
    assert manager.env_parameters == ({"wind": wind, "rain": rain} if whose == OURS else {"rain": rain})


@row("`training_behaviors`")
@row("Steps that do not finish before a reset")
@pytest.mark.parametrize("ask", [lambda manager: manager.training_behaviors, lambda manager: manager.reset({})])
def test_queries_and_resets_while_a_worker_is_busy(whose: str, ask: Any) -> None:
    with Gate() as gate:

        def program() -> None:
            own = {"drain_timeout_s": 0.1} if whose == OURS else {}
            manager = Maker(whose)(scripted(only_first({("step", 1): wait(gate.path)})), 2, **own)
            manager.reset({})
            step_until(manager, {1})
            ask(manager)

        check_returns(program, whose == OURS)


@row("`advance`, `get_properties`, `external_brains`")
@row("`workers_alive`")
def test_names_of_the_manager(make: Any, whose: str) -> None:
    manager = make.reset(scripted())
    assert [hasattr(manager, name) for name in ("advance", "get_properties", "external_brains")] == [whose == OURS] * 3
    names = ("workers_alive", "recent_restart_timestamps")
    assert [hasattr(manager, name) for name in names] == [whose == ORIGINAL] * 2


@row("Overriding `_queue_steps`")
def test_methods_that_may_not_be_overridden(make: Any, whose: str) -> None:
    for base, name in (
        (MANAGER, "_queue_steps"),
        (MANAGER, "_postprocess_steps"),
        ("SimpleEnvManager", "_generate_all_results"),
    ):
        calls: list[str] = []
        cls = class_of(whose, base)

        def own(self: Any, *args: Any, cls: Any = cls, name: str = name, calls: Any = calls) -> Any:
            calls.append(name)
            return getattr(cls, name)(self, *args)

        sub = type("Own", (cls,), {name: own})
        with raises(whose, ours=TypeError):
            manager = make(scripted(), cls=sub) if base == MANAGER else sub(Env(), None)
            manager.reset({})
            manager.set_policy("walk", Policy())
            manager.get_steps()
            assert calls


# ---- results ---------------------------------------------------------------------------------------------


@row("`get_steps()` before the first `reset`")
def test_steps_before_the_first_reset(make: Any, whose: str) -> None:
    (step,) = make(scripted()).get_steps()
    assert deciding(step) == ([1, 2] if whose == OURS else [2])  # after no step, or after one


@row("Statistics that an env sends during")
def test_statistics_of_a_reset(make: Any, whose: str) -> None:
    def factory(worker_id: int, side_channels: Any) -> Any:
        return Env(side_channels=side_channels, says={1: speed_message()})

    manager = make.reset(factory)
    of_reset, of_step = manager.first_step_infos[0], step_until(manager, {0})[0]
    found = [len(step.environment_stats.get("speed", ())) for step in (of_reset, of_step)]
    assert found == ([1, 1] if whose == OURS else [0, 2])


@row("A wait for results")
def test_the_processor_time_of_a_wait(make: Any, whose: str) -> None:
    with Gate() as gate:
        manager = make.reset(scripted(lambda worker_id: {("step", 1): wait(gate.path)}))
        helper = threading.Thread(target=lambda: (gate.wait_arrivals(1), threading.Event().wait(1.0), gate.open(1)))
        helper.start()
        before, began = time.thread_time(), time.monotonic()
        manager.get_steps()
        share = (time.thread_time() - before) / (time.monotonic() - began)
        helper.join()
    assert (share < 0.02) if whose == OURS else (share > 0.02)  # of a core, which may be shared with others


@row("`_take_step`")
def test_policies_that_are_called_once_for_all_workers(make: Any, whose: str) -> None:
    manager, _ = started(make, scripted(), 2, **({"is_deterministic": True} if whose == OURS else {}))
    policy = BatchPolicy()
    manager.set_policy("walk", policy)
    manager.get_steps()
    assert (policy.batches, len(policy.asked)) == (([[0, 1]], 0) if whose == OURS else ([], 2))


@row("A behaviour without agent manager")
def test_warnings_of_a_behaviour_without_agent_manager(make: Any, whose: str) -> None:
    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("stepmill.mlagents" if whose == OURS else "mlagents.trainers.env_manager")
    logger.addHandler(handler)
    manager = make.reset(scripted())
    for _ in range(3):
        manager.process_steps(manager.get_steps())
    logger.removeHandler(handler)
    assert len([each for each in records if "was not created" in each.getMessage()]) == (1 if whose == OURS else 4)


@row("An env raises one of ML-Agents' exceptions")
@row("`create_worker` after a crash")
def test_a_crash_of_one_env(make: Any, whose: str, tmp_path: Path) -> None:
    made: list[int] = []

    class Noted(class_of(whose)):  # type: ignore[misc]
        @staticmethod
        def create_worker(worker_id: int, *args: Any) -> Any:
            made.append(worker_id)
            return class_of(whose).create_worker(worker_id, *args)

    timeout = importlib.import_module("mlagents_envs.exception").UnityTimeOutException
    hook = once(tmp_path / "flag", raise_(lambda: timeout("late")))
    manager, agents = started(make, scripted(only_first({("step", 2): hook})), 2, cls=Noted)
    for _ in range(3):
        step_until(manager, {0, 1})
    assert agents["walk"].num_ended == (0 if whose == OURS else 1)
    assert made == ([0, 1] if whose == OURS else [0, 1, 0])
    assert manager.restart_counts == [1, 0]


def pass_by(env: Any) -> None: ...


@row("An env that has never had a result")
def test_an_env_that_fails_first(make: Any, whose: str, tmp_path: Path) -> None:
    timeout = importlib.import_module("mlagents_envs.exception").UnityTimeOutException
    late = once(tmp_path / "flag", raise_(lambda: timeout("late")))
    manager = make(scripted(lambda worker_id: {("step", 1): late, ("reset", 1): late if whose == OURS else pass_by}))
    manager.set_env_parameters({})
    with raises(whose, ours=timeout):
        manager.get_steps()


@row("A process is killed")
def test_a_process_that_is_killed(whose: str) -> None:
    def program() -> None:
        manager = Maker(whose)(scripted(lambda worker_id: {("step", 1): die}))
        manager.reset({})
        manager.get_steps()

    check_returns(program, whose == OURS)


@row("`UnityCommunicatorStoppedException`")
def test_an_env_that_is_stopped(make: Any, whose: str, tmp_path: Path) -> None:
    stopped = importlib.import_module("mlagents_envs.exception").UnityCommunicatorStoppedException
    hook = once(tmp_path / "flag", raise_(lambda: stopped("by the editor")))
    manager = make.reset(scripted(only_first({("step", 1): hook})), 2)
    if whose == ORIGINAL:
        step_until(manager, {0})
    while whose == OURS and not manager.stopped_workers:
        step_until(manager, {1})
    assert manager.restart_counts[0] == (whose == ORIGINAL)


class Local(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.gate = threading.Lock()


@row("Another exception of an env")
def test_exceptions_that_cannot_be_pickled(make: Any, whose: str) -> None:
    def program(kind: Any) -> Any:
        manager = Maker(whose)(scripted(lambda worker_id: {("step", 1): raise_(lambda: kind("lost"))}))
        manager.reset({})
        manager.get_steps()

    with pytest.raises(LookupError) as caught:
        program(LookupError)
    assert hasattr(caught.value.__cause__, "remote_traceback") is (whose == OURS)
    if whose == ORIGINAL:
        check_fails(lambda: program(Local))  # it waits without end, or its worker's connection is closed first
    else:
        with pytest.raises(Local, match="lost"):
            program(Local)


@row("An env raises `KeyboardInterrupt`")
def test_an_env_that_is_interrupted(make: Any, whose: str) -> None:
    communication = importlib.import_module("mlagents_envs.exception").UnityCommunicationException
    manager = make.reset(scripted(lambda worker_id: {("step", 1): raise_(KeyboardInterrupt)}))
    match = "At least one of the environments has closed" if whose == OURS else ""
    with pytest.raises(communication if whose == OURS else KeyboardInterrupt, match=match):
        manager.get_steps()


@row("Observations")
def test_large_observations(make: Any, whose: str) -> None:
    def factory(worker_id: int, side_channels: Any) -> Any:
        return Env({"walk": [[3]]}, shape=(4000,))

    manager = make.reset(factory, **({"payload_bytes": 4096} if whose == OURS else {}))
    assert manager.first_step_infos[0].current_all_step_result["walk"][0].obs[0].tolist() == [[3.0] * 4000]


@row("`env_workers[i].process`, `.conn`")
@row("`env_workers[i].send()`, `.recv()`")
def test_processes_pipes_and_messages(make: Any, whose: str) -> None:
    manager = make(scripted())
    worker = manager.env_workers[0]
    parts = (worker.process, worker.conn, manager.step_queue)
    assert [part is None for part in parts] == [whose == OURS] * 3
    commands = class_of(whose, "EnvironmentCommand")
    with raises(whose, ours=stepmill.UsageError):
        worker.send(commands.BEHAVIOR_SPECS)
        assert list(worker.recv().payload) == ["walk"]


@row("String commands of 0.15")
def test_string_commands(whose: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        class_of(whose, "EnvironmentCommand")("step", {})
    assert EnvironmentCommand.STEP.value == class_of(ORIGINAL, "EnvironmentCommand").STEP.value


row("Results of another form")(test_mlagents_programs.test_results_of_another_form)
row("Actions that cannot be pickled")(test_mlagents_programs.test_actions_that_cannot_be_pickled)
row("Timers in `timers.json`")(
    test_mlagents_trainers.test_the_timers_of_workers_are_among_mlagents_own_once_it_is_closed
)


@row("A call after `close()`")
def test_calls_of_a_closed_manager(make: Any, whose: str) -> None:
    manager = make.reset(scripted())
    manager.close()
    calls = (manager.get_steps, *(partial(each, {}) for each in (manager.reset, manager.set_env_parameters)))
    for call in (*calls, partial(manager.on_training_started, "walk", None)):
        with pytest.raises(UnityCommunicationException, match="send failed") as caught:
            call()
        assert isinstance(caught.value, stepmill.ClosedPoolError) is (whose == OURS)


@row("`close()`")
def test_envs_that_do_not_close(whose: str, tmp_path: Path) -> None:
    with Gate() as gate:

        def program() -> None:
            own = {"close_timeout_s": 0.2} if whose == OURS else {}
            manager = Maker(whose)(scripted(lambda worker_id: {("close", 1): wait(gate.path)}), **own)
            manager.reset({})
            manager.close()

        check_returns(program, whose == OURS)


def test_each_row_of_the_page_has_a_program() -> None:
    row.check(Path(__file__).parent, ROOT / "tests" / "frontends" / "mlagents")
