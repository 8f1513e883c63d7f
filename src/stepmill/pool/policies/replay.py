"""The policy "replay": after a fault, the episode is replayed in a rebuilt env, so that it continues without a difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from stepmill.pool.events import (
    EnvFailed,
    FailReplay,
    MarkFaulted,
    ReplayAt,
    ReplayDiffers,
    ReplayPaused,
    ReplayPlayed,
    Suspend,
)
from stepmill.pool.faults import fault_info
from stepmill.pool.policies.base import EnvErrorLimits, WorkerDeath, fail_over_limit
from stepmill.pool.policies.call_log import EpisodePosition
from stepmill.pool.policies.replayer import CallDiffers, EpisodeReplay, EpisodeReplayer, RepeatedCalls
from stepmill.pool.workers import WorkerState, WorkerSupervisor
from stepmill.spec.errors import EnvError, EnvTimeout, StepmillError, WorkerDied

MAX_PLAYS = 3  # of one episode, if each replay fails in a new way
MAX_SAME_FAILURES = 2  # of one kind in one step: another replay would fail, too
MAX_SAME_SIGNALS = 3  # the same for signals from outside, which may be a coincidence
_SIGNALS_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")


class ReplayPolicy:
    """Replays episodes. Those that cannot be replayed are cut short, with the reason in `info["fault"]`."""

    reports_deaths = False
    death_hint = "their episodes are replayed"

    def __init__(
        self,
        workers: WorkerSupervisor,
        limits: EnvErrorLimits,
        replayer: EpisodeReplayer,
        *,
        restarts_workers: bool,
        on_reset_repeated: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        """`restarts_workers`: this policy also handles deaths. `on_reset_repeated(env_id)`: called after a reset was repeated."""
        self._warn = warn
        self._workers = workers
        self._limits = limits
        self._replayer = replayer
        self._restarts_workers = restarts_workers
        self._on_reset_repeated = on_reset_repeated
        self._failures = RepeatedFailures()
        self._replays: dict[int, EpisodeReplay] = {}
        self._repeated: list[RepeatedCalls] = []  # calls of envs that are not suspended, to be verified

    # ---- faults -----------------------------------------------------------------------------------------------------

    def on_env_error(self, fault: EnvFailed, error: StepmillError) -> list[StepmillError]:
        env_id, state = fault.env_id, self._workers.state
        if self._limits.allow(env_id, error) is None:
            state.apply([MarkFaulted(env_id, fault.ticket)])
            return [error]
        self._record_failure(env_id, error)
        if self._needs_restart(env_id):
            self._begin_restart(fault.worker, error, 0.0)
        else:
            state.apply([Suspend(env_id, fault.ticket)])
            self._begin(env_id, fault_info("raised", error), is_new=False)
        return []

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        if not death.is_new:
            self._workers.state.apply([Suspend(fault.env_id, fault.ticket) for fault in death.faults])
            if self._workers.state_of(death.worker) is WorkerState.SERVING:
                self._begin_suspended(death.worker, death.error)
            return []
        delay_s = self._workers.count_restart(death.worker)
        if delay_s is None:
            return fail_over_limit(self._workers, death)
        env_id = self._running_env_of(death)
        if env_id is not None:
            self._record_failure(env_id, death.error)
        self.restart_worker(death, delay_s)
        return []

    def restart_worker(self, death: WorkerDeath, delay_s: float) -> None:
        self._begin_restart(death.worker, death.error, delay_s)

    def _begin_restart(self, worker: int, error: StepmillError, delay_s: float) -> None:
        self.drop_replays_of(worker)
        open_calls = self._replayer.open_calls(worker)

        def wait_for_calls() -> None:  # a living worker can still reply to them
            for future in open_calls:
                with contextlib.suppress(StepmillError):
                    future.result()

        self._workers.record_cause(worker, error)
        self._workers.begin_restart(worker, delay_s, is_replayed=True, before=wait_for_calls)

    def on_restarted(self, worker: int) -> None:
        waiting = self._replayer.repeat_waiting(worker)
        self._workers.serve(worker)
        for repeated in waiting:
            self._replayer.post_staged_calls(repeated)
        self._repeated += waiting
        self._begin_suspended(worker, self._workers.record_of(worker).error or self._workers.worker_died_error(worker))
        self.check_calls()

    def repeats_settings(self, server: int) -> bool:
        return self._restarts_workers and self._replayer.log.is_whole(server)

    def is_ready_for_call(self, worker: int) -> bool:
        """Whether the envs of a worker are rebuilt, so that they can be called."""
        if self._restarts_workers:
            dead = (WorkerState.DEAD_UNREPORTED, WorkerState.RESTARTING)
            if self._workers.check_process(worker).state in dead:
                return False
        state = self._workers.state
        return set(state.envs_of(worker)).isdisjoint(state.suspended_envs())

    # ---- replays ----------------------------------------------------------------------------------------------------

    def _begin_suspended(self, worker: int, error: StepmillError) -> None:
        state = self._workers.state
        for env_id in state.suspended_envs():
            if state.worker_of(env_id) == worker and env_id not in self._replays:
                self._begin(env_id, fault_info("died", error), is_new=True)

    def _begin(self, env_id: int, info: dict[str, str], *, is_new: bool) -> None:
        server = self._workers.state.server_of(env_id)
        replay = EpisodeReplay(server, env_id=env_id, info=info, is_new=is_new)
        self._replays[env_id] = replay
        reason = self._failures.pop_reason(env_id)
        if reason is None:
            self._play(replay)
        else:
            self._cut_short(replay, reason)

    def _play(self, replay: EpisodeReplay) -> None:
        reason = self._replayer.begin(replay)
        if reason is not None:
            self._cut_short(replay, reason)
        elif replay.env_id not in self._workers.state.suspended_envs():  # its reset was repeated
            del self._replays[replay.env_id]
            self._on_reset_repeated(replay.env_id)
            self._repeated.append(replay)

    def on_event(self, event: ReplayPaused) -> None:
        """Handle a replay that has reached a place or its end, or has failed."""
        replay = self._replays.get(event.env_id)
        if replay is None:
            return
        if isinstance(event, ReplayAt):
            self._replayer.continue_at(replay, event.step)
        elif isinstance(event, ReplayPlayed):
            self._finish(replay)
        elif isinstance(event, ReplayDiffers):
            self._cut_short(replay, f"step {event.step} gave another result than before")
        elif self._workers.check_process(self._workers.state.worker_of(event.env_id)).state is WorkerState.SERVING:
            self._replay_again(replay)  # else all envs are replayed after the restart of the worker

    def _replay_again(self, replay: EpisodeReplay) -> None:
        env_id = replay.env_id
        if replay.num_plays >= MAX_PLAYS:
            self._cut_short(replay, "it raised in between")  # at steps that had not failed before
        elif self._needs_restart(env_id):
            worker = self._workers.state.worker_of(env_id)
            self._begin_restart(worker, self._workers.worker_died_error(worker), 0.0)
        else:
            replay.is_new = False  # the calls from before the episode have been repeated
            self._play(replay)

    def _finish(self, replay: EpisodeReplay) -> None:
        try:
            if not self._replayer.verify(replay):
                return
        except (CallDiffers, StepmillError) as failure:
            self._cut_short(replay, str(failure))
            return
        self._replayer.finish(replay)
        del self._replays[replay.env_id]

    def check_calls(self) -> None:
        """Verify repeated calls of envs without a replay, if their replies have arrived since the last look."""
        waiting, self._repeated = self._repeated, []
        for repeated in waiting:
            worker = self._workers.worker_of_server(repeated.server)
            if self._workers.state_of(worker) is not WorkerState.SERVING:
                continue
            try:
                if not self._replayer.verify(repeated):
                    self._repeated.append(repeated)
            except (CallDiffers, StepmillError) as failure:
                self._workers.reapply_settings(worker, [repeated.server])
                self._warn(f"env object {repeated.server} was rebuilt, but its state may differ: {failure}")

    def _cut_short(self, replay: EpisodeReplay, reason: str) -> None:
        """Cut short an episode that cannot be replayed."""
        env_id, state = replay.env_id, self._workers.state
        has_log = state.can_replay(env_id)
        self._replayer.give_up(replay)
        del self._replays[env_id]
        info = {**replay.info, "not_replayable": reason}
        state.apply([FailReplay(env_id, state.ticket_of(env_id), info)])
        if has_log:
            self._warn(f"env {env_id} is not replayable: {reason}; its episode is cut short")

    def drop_replays_of(self, worker: int) -> None:
        """Drop the replays of a worker that is about to be restarted, or stays dead."""
        for env_id in self._workers.state.envs_of(worker):
            self._replays.pop(env_id, None)
        self._repeated = [each for each in self._repeated if self._workers.worker_of_server(each.server) != worker]

    # ---- repeated failures ------------------------------------------------------------------------------------------

    def _needs_restart(self, env_id: int) -> bool:
        """Whether a living env must be rebuilt, because calls have changed it and a reset would not undo that."""
        can_restart = self._restarts_workers and self._workers.can_restart_living
        return can_restart and self._replayer.was_modified(env_id)

    def _running_env_of(self, death: WorkerDeath) -> int | None:
        """Return the env that a worker was running when it died; None if it ran none, or could not be started."""
        running = self._workers.state.running_env(death.worker)
        if isinstance(death.error, EnvTimeout):  # a worker that was stopped took no command: the env_id is not known
            return running if running == death.error.env_id else None
        return running if isinstance(death.error, WorkerDied) and running >= 0 else None

    def _record_failure(self, env_id: int, error: StepmillError) -> None:
        """Count a failure of an env in a step, also in a replayed one. Resets are repeated, not replayed."""
        state, replay = self._workers.state, self._replays.get(env_id)
        if replay is None and not state.is_pending(env_id):
            return
        server = state.server_of(env_id)
        position = EpisodePosition.of(state, server)
        if not position.is_between:
            step = position.length if replay is None else self._replayer.step_of(replay)
            self._failures.record(env_id, (server, position.episode, step), state.ticket_of(env_id), error)


class RepeatedFailures:
    """Counts, per env, consecutive failures of one kind in one step."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[int, ...], str, int]] = {}
        self._tickets: dict[int, int] = {}
        self._reasons: dict[int, str] = {}

    def record(self, env_id: int, place: tuple[int, ...], ticket: int, error: StepmillError) -> None:
        """Count a failure at a place, which is (env object, episode, step).

        If a worker dies before its env is replayed, the failure is found a second time, with the same ticket.
        """
        if self._tickets.get(env_id) == ticket:
            return
        self._tickets[env_id] = ticket
        what = _kind_of(error)
        last_place, last_what, count = self._last.get(env_id, ((), "", 0))
        count = count + 1 if (last_place, last_what) == (place, what) else 1
        if count >= (MAX_SAME_SIGNALS if what in _SIGNALS_FROM_OUTSIDE else MAX_SAME_FAILURES):
            self._reasons[env_id] = f"step {place[-1]} failed in the same way when it was replayed ({what})"
        self._last[env_id] = place, what, count

    def pop_reason(self, env_id: int) -> str | None:
        """Return, once, why another replay would not help; None if it may."""
        return self._reasons.pop(env_id, None)


def _kind_of(error: StepmillError) -> str:
    """Return what errors of the same cause have in common. Not the text, which may contain times and addresses."""
    if isinstance(error, EnvError):
        return error.error_type
    if isinstance(error, WorkerDied):
        return error.signal_name or f"exit code {error.exit_code}"
    return type(error).__name__
