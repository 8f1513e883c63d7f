"""The random programs with the first numbers. `make soak` plays 100,000; python -m tests.fuzz plays more, or others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.__main__ import find_failure
from tests.fuzz.player import play
from tests.fuzz.programs import Move, Program, draw_program, shrink
from tests.pool_model.envs import RAISE
from tests.pool_model.model import PoolModel

SERIAL = ("serial",)


@pytest.fixture(autouse=True)
def _no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "stepmill")


@pytest.mark.parametrize(
    ("backend", "num_programs"),
    [
        ("serial", 60),
        ("thread", 30),
        ("fork", 5),
        ("kernel", 25),
        pytest.param("serial", 500, marks=pytest.mark.slow),
        pytest.param("thread", 200, marks=pytest.mark.slow),
        pytest.param("fork", 20, marks=pytest.mark.slow),
        pytest.param("forkserver", 8, marks=pytest.mark.slow),
        pytest.param("kernel", 200, marks=pytest.mark.slow),
    ],
)
def test_random_programs_do_what_the_model_says(backend: str, num_programs: int) -> None:
    if backend == "kernel":
        pytest.importorskip("numba")
    for number in range(num_programs):
        failure = find_failure(number, (backend,))
        assert failure is None, failure


def test_a_program_depends_on_its_number_alone() -> None:
    assert [draw_program(number) for number in range(50)] == [draw_program(number) for number in range(50)]


def test_a_wrong_value_is_found_and_its_program_printed_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    program = next(
        found for found in map(draw_program, range(100)) if found.has(backend="serial") and len(found.moves) > 20
    )
    next_of = PoolModel.next_of

    def wrong_next(model: PoolModel, *step: Any) -> object:
        then = next_of(model, *step)
        return replace(then, total=then.total, obs=(*then.obs[:4], then.obs[4] + 1, *then.obs[5:]))

    monkeypatch.setattr(PoolModel, "next_of", wrong_next)
    small = shrink(program, lambda each: play(each) is not None)
    text = play(small)

    assert text is not None
    assert len(small.moves) <= 2
    assert "pool = stepmill.Pool(env_fns(" in text
    assert "the next result is" in text


def test_a_fault_that_is_not_reported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"backend": "serial", "autoreset_mode": "NextStep", "on_fault": "truncate", "seeding": "continue"}
    step = Move("step", {"actions": [RAISE] * 4, "way": "step"})
    program = Program("single", 2, options, (RAISE,), moves=(step,))
    assert play(program) is None

    monkeypatch.setattr("tests.pool_model.envs.HistoryEnv._fails", lambda env, action: False)

    assert "the action of env 0 must fail" in str(play(program))
