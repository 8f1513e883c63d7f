"""Workers are broken at random, and no transition is lost, doubled, or given to the wrong env."""

from __future__ import annotations

import io
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stepmill._native import OwnedFd
from stepmill.pool import payloads
from stepmill.pool.events import Decision, Remedy, ServerView, Settle
from stepmill.pool.pool import Pool
from stepmill.pool.replays import EpisodeReplay, Replays
from stepmill.pool.start import PoolResources
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.batch import Batch
from stepmill.spec.errors import WorkerDied
from stepmill.spec.options import EnvState, PoolOptions
from tests.chaos import __main__ as chaos_main
from tests.chaos import results, run_chaos
from tests.chaos.__main__ import main as chaos_command
from tests.chaos.envs import UNREADABLE
from tests.chaos.kinds import KINDS, Kind
from tests.chaos.oracle import Oracle, RowRecord
from tests.chaos.report import ChaosReport
from tests.chaos.results import Result, _entry

MAX_RUNS = 20  # of chaos, until it finds the planted fault
# Python ignores an exception in the callback of a weak reference, with a warning.
INTERRUPTED_CALLBACKS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
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

OBS = [3, 777, 5, 2, 0, 0]  # identity, tag, clock, action, level, bumps
NEXT = [3, 777, 6, 4, 0, 0]
LAST = [3, 777, 10, 2, 0, 0]  # but one: row 3 has episodes of 11 steps
END = [3, 777, 11, 4, 0, 0]
FIRST = [3, 888, 0, -1, 0, 0]
BROKEN = {"truncated": True, "fault": "died", "at": None, "episode": (15.0, 5)}
TURN = {"after": LAST, "truncated": True, "final_obs": END, "final_at": (3, 777, 11), "episode": (66.0, 11)}
BATCHED = {"kind": "ragged", "is_ended": True}
UNREADABLE_NEXT = [3, 777, 6, UNREADABLE, 0, 0]
PAGES = {"kind": "unreadable infos"}


def complaint_of(
    obs: list[int],
    reward: float,
    *,
    kind: str = "truncate",
    after: list[int] = OBS,
    is_ended: bool = False,
    num_ended: int = 0,
    **flags: object,
) -> str:
    """Return the complaint of the oracle about a result of row 3, which was at `after` and got `action` (default 4)."""
    action = int(str(flags.pop("action", 4)))
    oracle = Oracle(kind_of(kind), ChaosReport(0))
    oracle.rows = [RowRecord(np.array([row, 0, 0, 0, 0, 0])) for row in range(8)]
    exhausted = num_ended == oracle._kind.budget
    oracle.rows[3] = RowRecord(np.array(after), is_ended=is_ended, num_ended=num_ended, is_exhausted=exhausted)
    oracle.record_command(3 // oracle._kind.rows_each, [action] * oracle._kind.rows_each)
    chosen = {"terminated": False, "truncated": False, "fault": None, "at": tuple(obs[:3]), **flags}
    if chosen.get("final_obs") is not None:
        chosen["final_obs"] = np.array(chosen["final_obs"])
    return oracle.find_wrong(oracle.rows[3], Result(3, np.array(obs), reward, **chosen)) or ""  # type: ignore[arg-type]


def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


@pytest.mark.parametrize(
    ("obs", "reward", "flags"),
    [
        (NEXT, 6.0, {}),
        (FIRST, 0.0, {"is_ended": True}),
        (OBS, 0.0, BROKEN),
        (OBS, 0.0, {**BROKEN, "episode": (21.0, 6)}),  # its worker died while it wrote the result of one more step
        ([9, *FIRST[1:]], 0.0, {"is_ended": True, "kind": "spares"}),
        (END, 11.0, {"after": LAST, "truncated": True, "episode": (66.0, 11)}),
        (FIRST, 11.0, {**TURN, "kind": "same step"}),
        (FIRST, 0.0, {**BROKEN, "kind": "same step", "final_obs": OBS, "at": (3, 888, 0)}),
        (END, 11.0, {**TURN, "kind": "budget, same step", "num_ended": 2, "at": None}),
        (OBS, 0.0, {"kind": "budget", "num_ended": 3, "at": None}),
        (OBS, 0.0, {**BATCHED, "fault": "died", "at": None}),  # the other row was broken: this one waits again
        (UNREADABLE_NEXT, 6.0, {**PAGES, "action": UNREADABLE, "omitted": ((3, "info['page']"),)}),
        (OBS, 0.0, {**BROKEN, **PAGES, "action": UNREADABLE}),  # it raised before it returned the info
        (FIRST, 0.0, {**PAGES, "action": UNREADABLE, "is_ended": True}),
    ],
)
def test_the_checks_of_chaos_let_right_results_pass(obs: list[int], reward: float, flags: dict[str, object]) -> None:
    assert complaint_of(obs, reward, **flags) == ""  # type: ignore[arg-type]


def test_the_checks_of_chaos_require_a_fault_of_an_env_that_a_call_has_found_rebuilt() -> None:
    report = ChaosReport(0)
    oracle = Oracle(kind_of("truncate"), report)
    oracle.rows = [RowRecord(np.array([row, 0, 0, 0, 0, 0])) for row in range(8)]
    assert [oracle.record_bump(3, bumps) for bumps in (1, 2)] == [None, None]
    assert oracle.record_bump(3, 4) == "object 3 has 4 bumps, after one of {2}"
    assert oracle.record_bump(3, 1) is None
    oracle.record_command(3, [4])
    oracle.check_result(oracle.rows[3], Result(3, np.array([3, 0, 1, 4, 0, 1]), 1.0, False, False, None, at=(3, 0, 1)))
    assert report.wrong == [": row 3: its env was rebuilt in the middle of an episode, and no fault was reported"]


@pytest.mark.parametrize(
    ("obs", "reward", "flags"),
    [
        ([4, *NEXT[1:]], 6.0, {}),  # another env's
        ([3, 778, *NEXT[2:]], 6.0, {}),  # of another episode
        ([3, 777, 7, 4, 0, 0], 7.0, {}),  # one was lost
        (OBS, 5.0, {}),  # doubled
        ([3, 777, 6, 2, 0, 0], 6.0, {}),  # another action's
        (NEXT, 5.0, {}),
        (NEXT, 6.0, {"truncated": True}),
        (NEXT, 6.0, {"terminated": True}),
        (NEXT, 6.0, {"at": (4, 777, 6)}),  # another env's info
        (NEXT, 6.0, {"at": None}),
        (NEXT, 6.0, {"final_obs": OBS}),
        (NEXT, 6.0, {"episode": (21.0, 6)}),
        ([*NEXT[:4], 1, 0], 6.0, {}),  # an attribute that was not set
        ([*NEXT[:4], 0, 1], 6.0, {}),  # a call that was not made
        (NEXT, 6.0, {"fault": "died"}),  # broken, and not marked
        (NEXT, 0.0, BROKEN),  # not the last good observation
        (OBS, 0.0, {**BROKEN, "episode": (55.0, 10)}),  # of the episode before
        (OBS, 0.0, {**BROKEN, "kind": "replay"}),  # broken, and must not be
        (OBS, 0.0, {**BROKEN, "kind": "replay, ragged"}),
        (OBS, 0.0, {**BROKEN, "kind": "serial, replay", "why": "not_replayable"}),  # it was not called
        (OBS, 0.0, {**BROKEN, "is_ended": True}),  # it was between two episodes
        (NEXT, 6.0, {"is_ended": True}),  # the old episode goes on
        ([4, *FIRST[1:]], 0.0, {"is_ended": True}),
        ([5, *FIRST[1:]], 0.0, {"is_ended": True, "kind": "spares"}),  # its object serves another env
        (END, 11.0, {"after": LAST, "truncated": True, "episode": (3.0, 2)}),
        (FIRST, 0.0, {"kind": "same step"}),  # lost silently
        (FIRST, 11.0, {**TURN, "kind": "same step", "final_obs": None}),
        (FIRST, 11.0, {**TURN, "kind": "same step", "final_obs": [4, *END[1:]]}),
        (FIRST, 11.0, {**TURN, "kind": "same step", "final_at": (4, 777, 11)}),
        (FIRST, 11.0, {**TURN, "kind": "same step", "at": (3, 777, 11)}),
        ([4, *FIRST[1:]], 11.0, {**TURN, "kind": "same step"}),
        (END, 11.0, {**TURN, "kind": "same step"}),  # no next episode
        (OBS, 0.0, {**BROKEN, "kind": "same step", "final_obs": OBS}),
        (FIRST, 0.0, {**BROKEN, "kind": "same step", "final_obs": NEXT, "at": (3, 888, 0)}),
        (FIRST, 11.0, {**TURN, "kind": "budget, same step", "num_ended": 2}),  # it will not be played
        (NEXT, 6.0, {"kind": "budget", "num_ended": 3}),  # it is exhausted, and was stepped
        (OBS, 5.0, {"kind": "budget", "num_ended": 3, "at": None}),
        (OBS, 0.0, {**BROKEN, **BATCHED, "episode": None}),  # its end is reported twice
        (
            OBS,
            0.0,
            {**BATCHED, "fault": "died", "at": None, "episode": (15.0, 5)},
        ),  # its return and length are reported twice
        (UNREADABLE_NEXT, 6.0, {**PAGES, "action": UNREADABLE}),  # the unreadable value is not reported
        (UNREADABLE_NEXT, 6.0, {**PAGES, "action": UNREADABLE, "omitted": ((4, "info['page']"),)}),  # another env's
        (NEXT, 6.0, {**PAGES, "omitted": ((3, "info['page']"),)}),  # there was nothing that cannot be read
    ],
)
def test_the_checks_of_chaos_find_wrong_results(obs: list[int], reward: float, flags: dict[str, object]) -> None:
    assert complaint_of(obs, reward, **flags) != ""  # type: ignore[arg-type]


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
        return [Settle(replay.env_id, view.ticket, Remedy.CUT, replay.info)]

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


def hide_what_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_entry", lambda info, key, i: None if key == "omitted" else _entry(info, key, i))


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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@INTERRUPTED_CALLBACKS
@pytest.mark.parametrize(
    ("plant", "kind", "complaint"),
    [
        (give_last_observations_to_others, "threads, same step", "not the next transition"),
        (swallow_marks, "serial, disabled", "not the next transition"),
        (mix_up_infos, "threads", "its info is of"),
        (mix_up_infos, "batched, same step", "its info is of"),
        (truncate_what_should_be_replayed, "serial, replay", "should have been replayed"),
        (truncate_what_should_be_replayed, "replay, ragged", "should have been replayed"),
        (drop_what_an_interrupt_kept, "ctrl-c", "NothingPending|RecvTimeout|UsageError|not the next transition"),
        (hide_what_cannot_be_read, "unreadable infos", "not readable"),
        (lengthen_budgets, "budget, same step", "will not be played|empty row of an exhausted env"),
        (name_one_lost_env, "raise", "no error has named them"),
        pytest.param(leave_a_descriptor, "ctrl-c in a start, process", "has left .*eventfd", marks=pytest.mark.slow),
        (close_a_descriptor_twice, "ctrl-c in a start, thread", "has closed descriptors .* of the program"),
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
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
