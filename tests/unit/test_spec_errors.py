"""Errors say what happened, survive a pickle, and are raised as one when there are several at once."""

import copy
import json
import pickle
import sys

import pytest

from stepmill.spec import errors
from stepmill.spec.errors import BadOutput, EnvError, RecvTimeout, StepmillError, WorkerDied, join_errors


class Plain(LookupError):
    pass


class Outer:
    class Inner(Plain):
        pass


class Odd(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


ONE_OF_EACH = [
    errors.StepmillError("something"),
    errors.UsageError("a mistake"),
    errors.BusyEnvError("envs are busy", env_ids=[1, 2]),
    errors.ClosedPoolError("closed"),
    errors.EnvError("env 3 raised", env_id=3, phase="step", error_type="a.B", remote_traceback="Traceback: here\n"),
    errors.BadOutput("env 1 is odd", env_id=1, leaf="observation['x']", phase="step"),
    errors.EnvTimeout("env 1 hangs", env_id=1, phase="reset", timeout_s=1.5),
    errors.WorkerDied("worker 0 died", worker=0, env_ids=[0, 1], signal_name="SIGKILL"),
    errors.LauncherDied("it is gone", signal_name="SIGKILL", is_final=True),
    errors.RecvTimeout("too slow", env_ids=[4], timeout_s=0.5),
    errors.MissingExtraError(module="torch", extra="torch"),
    errors.EngineBug("impossible"),
]
ids = [type(error).__name__ for error in ONE_OF_EACH]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=ids)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_survives_with_all_its_attributes(error, through):
    made = through(error)
    assert type(made) is type(error)
    assert made.__dict__ == error.__dict__
    assert str(made) == str(error)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(errors.BusyEnvError("a"), ValueError), (RecvTimeout("a"), TimeoutError), (ONE_OF_EACH[-2], ImportError)],
)
def test_errors_are_caught_by_the_built_in_name_too(error, builtin):
    assert isinstance(error, builtin)
    assert isinstance(error, StepmillError)


def test_a_timeout_of_an_env_is_not_taken_for_a_wait_that_can_be_repeated():
    assert not issubclass(errors.EnvTimeout, TimeoutError)


@pytest.mark.parametrize(
    "cls", [ValueError, KeyError, OSError, UnicodeDecodeError, AttributeError, Plain, Outer.Inner, json.JSONEncoder]
)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, lambda error: error])
def test_an_env_error_is_of_the_class_that_the_env_raised(cls, through):
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    error = through(EnvError("env 3 raised", env_id=3, error_type=name, remote_traceback="here"))
    assert isinstance(error, cls) is issubclass(cls, Exception)
    assert (type(error).__name__, str(error)) == ("EnvError", "env 3 raised\n\ntraceback of env 3:\nhere")
    assert isinstance(join_errors([error, EnvError("env 4 raised", env_id=4)]), cls) is issubclass(cls, Exception)


@pytest.mark.parametrize("cls", [StopIteration, SystemExit, TimeoutError, Odd, json.JSONDecodeError])
def test_an_env_error_is_of_no_class_that_would_mislead_its_handlers(cls):
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    assert type(EnvError("env 3 raised", error_type=name)) is EnvError


def test_the_class_of_an_env_error_is_not_imported():
    assert "xml.sax.xmlreader" not in sys.modules
    assert type(EnvError("env 3 raised", error_type="xml.sax.xmlreader.XMLReader")) is EnvError
    assert "xml.sax.xmlreader" not in sys.modules


def test_an_env_error_shows_the_remote_traceback():
    assert str(ONE_OF_EACH[4]) == "env 3 raised\n\ntraceback of env 3:\nTraceback: here"


def test_a_missing_extra_names_the_command():
    assert str(ONE_OF_EACH[-2]) == "torch is not installed; run: pip install 'stepmill[torch]'"


def test_one_error_stays_itself():
    error = EnvError("env 0 raised", env_id=0)
    assert join_errors([error]) is error


def test_equal_faults_are_shown_once():
    faults = [
        EnvError(f"env {i} raised ValueError in construct: no licence", env_id=i, remote_traceback="Traceback: there\n")
        for i in range(64)
    ]
    faults[7] = EnvError("env 7 raised OSError in construct", env_id=7, remote_traceback="Traceback: elsewhere\n")
    joined = join_errors(faults)
    assert len(joined.others) == 63
    assert str(joined) == (
        "env 0 raised ValueError in construct: no licence\n\n"
        "the same happened to envs 1-6, 8-63\n"
        "and at the same time: env 7 raised OSError in construct\n\n"
        "traceback of env 0:\nTraceback: there\n\n"
        "traceback of env 7:\nTraceback: elsewhere"
    )


def test_equal_outputs_are_shown_once():
    faults = [BadOutput(f"env {i} gave a wrong output of step: the reward is text", env_id=i) for i in range(8)]
    assert str(join_errors(faults)) == (
        "env 0 gave a wrong output of step: the reward is text\n\nthe same happened to envs 1-7"
    )


def test_faults_of_workers_have_no_env_and_are_counted():
    faults = [EnvError(f"worker {i} could not load it", remote_traceback="Traceback: there\n") for i in range(3)]
    assert str(join_errors(faults)) == (
        "worker 0 could not load it\n\nthe same happened 2 more times\n\ntraceback of the worker:\nTraceback: there"
    )
    assert "the same happened 1 more time\n" in str(join_errors(faults[:2]))


def test_many_different_faults_are_counted():
    faults = [EnvError(f"env {i} raised ValueError in construct: port {i} is taken", env_id=i) for i in range(64)]
    text = str(join_errors(faults))
    assert "port 4 is taken" in text
    assert "port 5 is taken" not in text
    assert "and 59 more faults, which are in `others` of this error" in text


def test_several_errors_become_the_first_and_mention_all():
    first = EnvError("env 0 raised", env_id=0, remote_traceback="here")
    second = WorkerDied("worker 1 died", worker=1, env_ids=[2])
    third = EnvError("env 5 raised", env_id=5, remote_traceback="there")
    joined = join_errors([first, join_errors([second, third])])
    assert type(joined) is EnvError
    assert joined.env_id == 0
    assert [other.message for other in joined.others] == ["worker 1 died", "env 5 raised"]
    for text in ("env 0 raised", "worker 1 died", "env 5 raised", "here", "there"):
        assert text in str(joined)
    assert first.others == ()
    assert str(pickle.loads(pickle.dumps(joined))) == str(joined)
