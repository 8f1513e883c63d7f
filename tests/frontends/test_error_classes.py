"""One rule for all front-ends: an error that replaces one of an original's is also of the original's class."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepmill.frontends import alf, di_engine, gymnasium, mlagents, multi_env
from stepmill.spec.errors import ArgumentTypeError, StepmillError

ERRORS = "stepmill.frontends."
# Our class, and the class that the original raises in that place. Names without a dot are Python's.
TABLE = {
    "alf.errors.ActionError": "RuntimeError",
    "alf.errors.EnvTimeoutError": "RuntimeError",
    "alf.errors.InterruptedEnvError": "RuntimeError",
    "alf.errors.InterruptedWorkerError": "RuntimeError",
    "alf.errors.NotAnArrayError": "AttributeError",
    "alf.errors.NotStartedError": "AssertionError",
    "alf.errors.SpareEnvError": "RuntimeError",
    "alf.errors.StartMethodError": "AssertionError",
    "alf.errors.TimeStepError": "RuntimeError",
    "di_engine.errors.ClosedAttributeError": "AttributeError",
    "di_engine.errors.ConnectionTimeout": "ConnectionError",
    "di_engine.errors.ManagerClosedError": "AssertionError",
    "di_engine.errors.ManagerUsageError": "AssertionError",
    "di_engine.errors.MethodError": "RuntimeError",
    "di_engine.errors.MissingAttributeError": "AttributeError",
    "di_engine.errors.ObservationError": "ValueError",
    "di_engine.errors.ResetParamError": "RuntimeError",
    "di_engine.errors.RetriesError": "RuntimeError",
    "di_engine.errors.StepTimeout": "TimeoutError",
    "di_engine.errors.UnknownCommandError": "KeyError",
    "di_engine.errors.UnknownEnvError": "KeyError",
    "di_engine.errors.UnknownManagerError": "KeyError",
    "gymnasium.errors.ClosedVectorEnvError": "gymnasium.error.ClosedEnvironmentError",
    "gymnasium.errors.MissingModuleError": "ModuleNotFoundError",
    "gymnasium.errors.NothingPendingError": "gymnasium.error.NoAsyncCallError",
    "gymnasium.errors.PendingCallError": "gymnasium.error.AlreadyPendingCallError",
    "gymnasium.errors.SpaceMismatchError": "RuntimeError",
    "gymnasium.errors.SpecMismatchError": "RuntimeError",
    "gymnasium.errors.WaitTimeout": "multiprocessing.TimeoutError",
    "mlagents.failures.UnityClosedError": "mlagents_envs.exception.UnityCommunicationException",
    "mlagents.failures.UnityStuckError": "TimeoutError",
    "mlagents.failures.UnityWorkerDied": "mlagents_envs.exception.UnityCommunicationException",
    "mlagents.failures.UnityWorkerTimeout": "mlagents_envs.exception.UnityTimeOutException",
    "multi_env.multi.ClosedMultiEnvError": "RuntimeError",
    "multi_env.remote.LifeCycleError": "ValueError",
    "overrides.OverrideError": "TypeError",
    "sb3.NoAttributeError": "AttributeError",
    "torchrl.errors.ArgumentCountError": "RuntimeError",
    "torchrl.errors.DeadWorkerError": "RuntimeError",
    "torchrl.errors.LateWorkerError": "RuntimeError",
    "torchrl.errors.MissingEnvPoolError": "ImportError",
    "torchrl.errors.MissingActionError": "KeyError",
    "torchrl.errors.NotSteppedError": "RuntimeError",
    "torchrl.errors.StepOutputError": "TypeError",
    "torchrl.errors.StillBusyError": "RuntimeError",
}
# Errors that no user sees as such: bases, and what becomes an abnormal timestep.
NOT_RAISED = {"di_engine.errors.TornError", "di_engine.errors._EnvException", "gymnasium.errors._CallError"}


def _module_of(name: str) -> Any:
    home = ERRORS + name.rpartition(".")[0]
    if home.endswith(".sb3"):
        pytest.importorskip("stable_baselines3")
    return importlib.import_module(home)


def _original(name: str) -> Any:
    home, _, cls = name.rpartition(".")
    if not home:
        return getattr(builtins, cls)
    return getattr(importlib.import_module(home), cls) if importlib.util.find_spec(home.partition(".")[0]) else cls


@pytest.mark.parametrize("name", TABLE)
def test_an_error_is_of_the_class_that_it_replaces(name: str) -> None:
    error = getattr(_module_of(name), name.rpartition(".")[2])
    original = _original(TABLE[name])
    assert issubclass(error, StepmillError)
    if isinstance(original, str):  # the library is not installed here: the class has the name of the library's
        assert original in [base.__name__ for base in error.__mro__]
    else:
        assert issubclass(error, original)


def _subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def test_the_table_has_each_error_of_a_front_end() -> None:
    for home in {name.rpartition(".")[0] for name in TABLE} - {"sb3"}:
        importlib.import_module(ERRORS + home)
    found = {f"{each.__module__}.{each.__qualname__}" for each in _subclasses(StepmillError)}
    own = {name.removeprefix(ERRORS) for name in found if name.startswith(ERRORS)}
    # EnvErrors that are also of the class of an env's exception are made as they are raised, and have its name.
    assert {name for name in own if "<" not in name and "+" not in name} - {*TABLE} - NOT_RAISED == set()


NEAREST = "num_worker is not an option of stepmill; did you mean num_workers"
UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "alf": (lambda: alf.FastParallelEnvironment([], num_worker=1), NEAREST),
    "base manager": (lambda: di_engine.BaseEnvManager([object], num_worker=1), NEAREST),
    "di_engine": (lambda: di_engine.SyncSubprocessEnvManager([object], num_worker=1), NEAREST),
    "gymnasium": (lambda: gymnasium.VectorEnv([object], num_worker=1), NEAREST),
    "mlagents": (lambda: mlagents.SubprocessEnvManager([], on_crahs=1), "on_crahs is .*; did you mean on_crash"),
    "mlagents, far": (lambda: mlagents.SubprocessEnvManager([], zzz=1), "zzz is .*; there are restarts, on_crash"),
    "multi_env": (lambda: multi_env.SubprocessEnv(object, num_worker=1), NEAREST),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_keyword_is_a_type_error_that_names_the_nearest_option(name: str) -> None:
    make, text = UNKNOWN[name]
    with pytest.raises(ArgumentTypeError, match=text) as caught:
        make()
    assert isinstance(caught.value, TypeError)
