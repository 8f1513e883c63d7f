"""Workers are broken at random, and no transition is lost, doubled, or given to the wrong env."""

from __future__ import annotations

import io
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stepmill._native import OwnedFd
from stepmill.pool import payloads
from stepmill.pool.events import Decision, Remedy, ResolveFault, ServerView
from stepmill.pool.pool import Pool
from stepmill.pool.replays import EpisodeReplay, Replays
from stepmill.pool.start import PoolResources
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.batch import Batch
from stepmill.spec.errors import WorkerDied
from stepmill.spec.options import EnvState, PoolOptions
from tests.chaos import __main__ as chaos_main
from tests.chaos import run_chaos
from tests.chaos.__main__ import main as chaos_command
from tests.chaos.kinds import KINDS, Kind
from tests.chaos.report import ChaosReport
from tests.chaos.rounds import Round
from tests.chaos.storm import StormModel
from tests.pool_model import commands, results
from tests.pool_model.envs import (
    BUMPS,
    CLOCK,
    COUNT,
    IDENTITY,
    LEVEL,
    MIX,
    RAISE,
    SEED,
    first_place,
    next_place,
)  # fmt: skip
from tests.pool_model.results import Result, WrongError

MAX_RUNS = 20  # of chaos, until it finds the planted fault
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Python ignores an exception in the callback of a weak reference, with a warning.
INTERRUPTED_CALLBACKS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@INTERRUPTED_CALLBACKS
def test_every_transition_is_right_while_workers_die_stop_and_hang() -> None:
    report = run_chaos(20.0, seed=1)

    assert report.num_wrong == 0, str(report)
    assert set(report.rounds) == {kind.name for kind in KINDS}, report
    assert min(report.inflicted.values()) > 0, report
    assert report.broken > 0, report
    assert report.capsules > 0, report
    assert report.transitions > 500, report
    assert report.replays > 100, report
    assert report.calls > report.calls_failed, report
    assert report.revivals > 0, report


# ---- the checks find what is wrong -----------------------------------------------------------------------------------

FAULT = {"kind": "died", "message": "planted"}


def is_next(result: Result) -> bool:
    """Whether it is that of a step in the middle of an episode."""
    return result.fault is None and result.obs[CLOCK] > 2 and not any(result.ends) and not result.omitted


def is_first(result: Result) -> bool:
    return result.obs[CLOCK] == 0 and not any(result.ends)


def is_end(result: Result) -> bool:
    return result.fault is None and any(result.ends)


def is_fault(result: Result) -> bool:
    return result.fault is not None and any(result.ends)


def shifted(column: int) -> Callable[[Result], Result]:
    """Return a function that changes a column of the observation."""
    return lambda result: replace(result, obs=tuple(each + (at == column) for at, each in enumerate(result.obs)))


def with_fields(**fields: Any) -> Callable[[Result], Result]:
    return lambda result: replace(result, **fields)


CUT = with_fields(fault=FAULT, reward=0.0, ends=(False, True))
SERIAL = Kind(name="serial", backend="serial", fatal=(RAISE,), resets=(RAISE,))
SAME = replace(SERIAL, name="same step", options={"autoreset_mode": "SameStep"})
BUDGET = replace(SERIAL, name="budget", options={"autoreset_mode": "SameStep", "num_episodes": 2}, fatal=(), resets=())
REPLAY = replace(SERIAL, name="replay", options={"on_fault": "replay"}, fatal=(), steps=(RAISE,), resets=(), calls=())
RAGGED = replace(REPLAY, name="replay, ragged", rows_each=2, is_ragged=True)
SPARES = replace(SERIAL, name="spares", options={"resets": {"spare_envs": 3}})
PAGES = replace(SERIAL, name="unreadable", has_unreadable=True)


@pytest.mark.parametrize(
    ("kind", "where", "change"),
    [
        *[(SERIAL, is_next, shifted(column)) for column in (IDENTITY, SEED, COUNT, CLOCK, MIX, LEVEL)],
        (REPLAY, is_next, shifted(BUMPS)),  # elsewhere a rebuilt env has forgotten its calls
        *[(SERIAL, is_first, shifted(column)) for column in (IDENTITY, SEED, COUNT, CLOCK, MIX, LEVEL)],
        (SERIAL, is_next, with_fields(reward=5.0)),
        (SERIAL, is_next, with_fields(ends=(False, True))),
        (SERIAL, is_next, with_fields(ends=(True, False))),
        (SERIAL, is_next, with_fields(info={})),
        (SERIAL, is_next, with_fields(info={"mix": 4, "where": {"clock": 6}})),  # another env's
        (SERIAL, is_next, with_fields(final_obs=(0,) * 7)),
        (SERIAL, is_next, with_fields(episode=(21.0, 6))),
        (SERIAL, is_next, with_fields(fault=FAULT)),  # broken, and not marked
        (SERIAL, is_next, lambda result: shifted(MIX)(replace(CUT(result), info={}))),  # not the last good observation
        (SERIAL, is_first, CUT),  # between two episodes
        (SERIAL, is_end, with_fields(ends=(False, False))),
        (SERIAL, is_end, with_fields(episode=(3.0, 2))),
        (SERIAL, is_end, with_fields(episode=None)),
        (SERIAL, is_fault, with_fields(fault=None)),
        (SERIAL, is_fault, with_fields(ends=(False, False))),
        (SERIAL, is_fault, with_fields(reward=1.0)),
        (SERIAL, is_fault, with_fields(episode=(55.0, 10))),  # of the episode before
        (SERIAL, is_fault, shifted(CLOCK)),
        (REPLAY, is_next, CUT),  # it must be replayed
        (RAGGED, is_next, CUT),
        (SPARES, is_first, shifted(SEED)),
        (SPARES, is_first, shifted(IDENTITY)),
        (SAME, is_end, with_fields(final_obs=None)),
        (SAME, is_end, with_fields(final_obs=(0,) * 7)),
        (SAME, is_end, with_fields(final_info={})),
        (SAME, is_end, with_fields(info={})),
        (SAME, is_end, shifted(IDENTITY)),
        (SAME, is_end, lambda result: replace(result, obs=result.final_obs)),  # no next episode
        (SAME, is_fault, with_fields(final_obs=None)),
        (SAME, is_fault, with_fields(final_obs=(0,) * 7)),
        (SAME, is_fault, lambda result: replace(result, obs=result.final_obs)),
        (
            BUDGET,
            lambda result: is_end(result) and result.obs == result.final_obs,
            shifted(COUNT),
        ),  # an episode too many
        (BUDGET, lambda result: not result.info and not any(result.ends), with_fields(reward=6.0)),  # it is exhausted
        (PAGES, lambda result: result.omitted != (), with_fields(omitted=())),
        (PAGES, lambda result: result.omitted != (), with_fields(omitted=((9, "info['page']"),))),  # another env's
        (PAGES, is_next, with_fields(omitted=((0, "info['page']"),))),  # there was nothing that cannot be read
    ],
)
def test_the_model_finds_a_result_of_which_anything_is_changed(
    kind: Kind, where: Callable[[Result], bool], change: Callable[[Result], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []

    def rows_with_one_change(batch: Batch) -> Iterator[tuple[int, Result]]:
        for env_id, result in results.rows_of(batch):
            is_chosen = not changed and where(result)
            changed.extend([result] * is_chosen)
            yield env_id, change(result) if is_chosen else result

    monkeypatch.setattr(commands, "rows_of", rows_with_one_change)
    with one_round(kind) as chaos, pytest.raises(WrongError):
        advance_until(chaos, changed)


def advance_until(chaos: Round, changed: list[Result]) -> None:
    chaos.begin()
    for _ in range(2000):
        assert not changed, f"{changed} was changed, and not found"
        chaos.advance()
    pytest.fail("there was nothing to change")


@contextmanager
def one_round(kind: Kind) -> Iterator[Round]:
    """Yield a round that has not begun."""
    chaos = Round(ChaosReport(0), random.Random(1), kind, is_sync=True, context="fork")
    with chaos.folder, chaos.pool:
        yield chaos


def test_the_model_finds_a_result_that_is_received_twice() -> None:
    with one_round(SERIAL) as chaos:
        chaos.begin()
        batch = chaos.pool.step(np.zeros(8, np.int64))
        with pytest.raises(WrongError, match="had no command"):
            chaos.model.receive(3, [Result(tuple(batch.obs[3].tolist()), 1.0, (False, False))], [0] * 8)


def test_an_env_that_a_call_has_found_rebuilt_must_have_a_fault() -> None:
    model = StormModel(kind_of("truncate").setup, [0] * 8)
    model.report, model.named, env = ChaosReport(0), set(), model.envs[3]
    env.rows[0].place, env.rows[0].is_over = first_place(3, 777, 0, 0, 0, length=11), False
    for bumps in (1, 2):
        model.record_bump(3, bumps)
    with pytest.raises(WrongError, match=r"object 3 has 4 bumps, after one of .2."):
        model.record_bump(3, 4)
    model.record_bump(3, 1)
    model.send(env, [8])
    then = next_place(env.rows[0].place, 8, 0, 1)
    with pytest.raises(WrongError, match="a rebuilt env goes on in the middle of an episode"):
        model.receive(3, [Result(then.obs, then.reward, then.ends, then.info)], [0] * 8)


def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


# ---- chaos finds faults that are planted in the engine -----------------------------------------------------------------


def change_infos(monkeypatch: pytest.MonkeyPatch, change: Callable[[payloads.InfoParts], payloads.InfoParts]) -> None:
    plain = payloads.InfoMaker.make

    def make(self: payloads.InfoMaker, *batch: Any) -> dict[str, Any]:
        return plain(self, *change(payloads.InfoParts(*batch)))

    monkeypatch.setattr(payloads.InfoMaker, "make", make)


def give_last_observations_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotated(batch: payloads.InfoParts) -> payloads.InfoParts:
        rows, finals = [row for row, _ in batch.finals], [obs for _, obs in batch.finals]
        return batch._replace(finals=list(zip(rows, [*finals[1:], *finals[:1]], strict=True)))

    change_infos(monkeypatch, rotated)


def swallow_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmarked(batch: payloads.InfoParts) -> payloads.InfoParts:
        return batch._replace(payloads=[(row, payload, None, objects) for row, payload, _, objects in batch.payloads])

    change_infos(monkeypatch, unmarked)


def mix_up_infos(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(batch: payloads.InfoParts) -> payloads.InfoParts:
        rows = batch.payloads
        return batch._replace(payloads=[(row, rows[i - 1][1], *rest) for i, (row, _, *rest) in enumerate(rows)])

    change_infos(monkeypatch, moved)


def truncate_what_should_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: Replays, replay: EpisodeReplay, view: ServerView) -> list[Decision]:
        del self._replays[replay.env_id]
        return [ResolveFault(replay.env_id, view.ticket, Remedy.CUT, replay.info)]

    monkeypatch.setattr(Replays, "_play", cut)


def drop_what_an_interrupt_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Pool.recv

    def recv(self: Pool, *args: Any, **kwargs: Any) -> Batch:
        try:
            return plain(self, *args, **kwargs)
        except KeyboardInterrupt:
            ready = [env_id for env_id, state in enumerate(self.states) if state is EnvState.READY]
            if ready:
                plain(self, len(ready))
            raise

    monkeypatch.setattr(Pool, "recv", recv)


def lengthen_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Kind.pool_options

    def more(self: Kind, context: str, crash_dir: str | None) -> PoolOptions:
        return replace(plain(self, context, crash_dir), num_episodes=4)

    monkeypatch.setattr(Kind, "pool_options", more)


def name_one_lost_env(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = WorkerSupervisor.worker_died_error

    def of_one(self: WorkerSupervisor, worker: int) -> WorkerDied:
        error = plain(self, worker)
        error.env_ids = error.env_ids[:1]
        return error

    monkeypatch.setattr(WorkerSupervisor, "worker_died_error", of_one)


def at_the_end_of_pools(monkeypatch: pytest.MonkeyPatch, damage: Callable[[], object]) -> None:
    plain = PoolResources._end

    def end(self: PoolResources, timeout_s: float) -> None:
        plain(self, timeout_s)
        damage()

    monkeypatch.setattr(PoolResources, "_end", end)


def leave_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[OwnedFd] = []
    at_the_end_of_pools(monkeypatch, lambda: left.append(OwnedFd.eventfd()))


def close_if_foreign(fd: int) -> None:
    with suppress(OSError):
        if "foreign" in os.readlink(f"/proc/self/fd/{fd}"):
            os.close(fd)


def close_a_descriptor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        """Is destroyed by the garbage collector alone."""

        def __init__(self) -> None:
            self.itself = self
            free = os.dup(0)
            os.close(free)
            weakref.finalize(self, close_if_foreign, free)

    at_the_end_of_pools(monkeypatch, Cycle)


@INTERRUPTED_CALLBACKS
@pytest.mark.parametrize(
    ("plant", "kind", "complaint"),
    [
        (give_last_observations_to_others, "threads, same step", "the next result is"),
        (swallow_marks, "serial, disabled", "must fail"),
        (mix_up_infos, "threads", "a first result is|the next result is"),
        (mix_up_infos, "batched, same step", "a first result is|the next result is"),
        (truncate_what_should_be_replayed, "serial, replay", "should have been replayed"),
        (truncate_what_should_be_replayed, "replay, ragged", "should have been replayed"),
        (drop_what_an_interrupt_kept, "ctrl-c", "is lost|must be PENDING"),
        (lengthen_budgets, "budget, same step", "the next result is|it must be EXHAUSTED"),
        (name_one_lost_env, "raise", "no error has named them"),
        pytest.param(
            leave_a_descriptor, "ctrl-c in a start, process", "has left or closed .*eventfd", marks=pytest.mark.slow
        ),
        (close_a_descriptor_twice, "ctrl-c in a start, thread", "descriptor .* of the program was closed"),
    ],
)
def test_chaos_finds_a_fault_that_is_planted_in_the_engine(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], kind: str, complaint: str
) -> None:
    plant(monkeypatch)

    for seed in range(MAX_RUNS):  # the timing of Ctrl-C and signals depends on the machine
        report = run_chaos(1.5, seed, kinds=[kind_of(kind)])
        if any(re.search(complaint, text) for text in report.wrong):
            break
    else:
        pytest.fail(str(report))


@pytest.mark.parametrize(("arguments", "has_lines"), [([], True), (["--quiet"], False)])
def test_a_pass_is_reported_in_a_line_unless_it_is_to_be_quiet(arguments, has_lines, capsys) -> None:
    status = chaos_command(["--seconds", "0.1", "--round-seconds", "0.2", "--kind", KINDS[0].name, *arguments])

    out, err = capsys.readouterr()
    assert status == 0
    assert ("chaos: " in err) is has_lines
    assert "transitions checked" in out


def test_the_bar_of_a_chaos_run_begins_after_a_second_and_names_the_round(monkeypatch) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=100)
    monkeypatch.setattr(chaos_main, "Console", lambda *, stderr: terminal)
    report = ChaosReport(0, seconds=0.5, now="round 0, raise")

    with chaos_main._bar(10.0, is_quiet=False) as draw:
        draw(report)
        assert file.getvalue() == ""
        draw(replace(report, seconds=5.0, now="round 1, truncate"))

    assert "chaos: round 1, truncate" in file.getvalue()
