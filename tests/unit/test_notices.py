"""Warnings of stepmill name the user's line."""

from __future__ import annotations

import functools
import linecache
import threading
import warnings
import weakref

import pytest
from gymnasium.vector import VectorEnv

import stepmill
from stepmill.backends.base import warn_of_close_faults
from stepmill.spec.notices import warn
from stepmill.testing.faulty import RaisingEnv


def blamed_line(warning: warnings.WarningMessage) -> str:
    """Return the source line that a warning names."""
    return linecache.getline(warning.filename, warning.lineno).strip()


def test_a_warning_names_the_line_that_called_stepmill():
    pool = stepmill.Pool([functools.partial(RaisingEnv, "close")], backend="serial")
    with pytest.warns(RuntimeWarning, match="in close") as caught:
        pool.close()
    assert [blamed_line(warning) for warning in caught] == ["pool.close()"]


def test_a_warning_names_the_same_line_however_deep_in_stepmill_it_is_given():
    record = {"phase": "close", "type": "ValueError", "message": "no", "traceback": ""}
    with pytest.warns(RuntimeWarning, match="in close") as caught:
        warn_of_close_faults(0, [(0, record)])
    assert [blamed_line(warning) for warning in caught] == ["warn_of_close_faults(0, [(0, record)])"]


def test_a_warning_given_by_a_finalizer_names_the_line_that_let_the_object_go():
    class Thing:
        pass

    thing = Thing()
    weakref.finalize(thing, warn, "finalized")
    with pytest.warns(RuntimeWarning, match="finalized") as caught:
        del thing
    assert [blamed_line(warning) for warning in caught] == ["del thing"]


class ClosedByGymnasium(VectorEnv):
    close_extras = staticmethod(functools.partial(warn, "closed"))


def test_a_warning_within_close_of_gymnasiums_base_class_names_the_line_that_closed():
    envs = ClosedByGymnasium()
    with pytest.warns(RuntimeWarning, match="closed") as caught:
        envs.close()
    assert [blamed_line(warning) for warning in caught] == ["envs.close()"]


def test_a_warning_from_a_thread_of_stepmill_names_no_line_of_a_module():
    thread = threading.Thread(target=warn, args=("from a thread",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert [warning.filename for warning in caught] == ["<stepmill>"]


def test_a_warning_is_shown_once_per_line_like_any_other():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("again and again")
    assert len(caught) == 1


def test_a_warning_may_be_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="stop"):
            warn("stop", UserWarning)
