"""What a fault leads to: an error, an episode that is cut short and marked, or one that is played again.

fault ─► budget left? ─ no ─► error, the env is FAULTED
            │ yes
            ├ truncate: the ledger marks the episode; a dead worker restarts in a thread, nobody waits for it
            └ replay:   a dead worker restarts, its envs' episodes are played again; what cannot be is truncated
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence

from stepmill import _native
from stepmill.backends.base import Backend
from stepmill.pool.capsules import CapsuleDesk
from stepmill.pool.faults import FaultKind, FaultRow, after_attempts, fault_error, fault_info, kind_of, late_error
from stepmill.pool.repetitions import Repetitions
from stepmill.pool.replays import FAILED_BETWEEN, Replays
from stepmill.pool.restarts import Restarts
from stepmill.pool.retries import RETRIED, ResetRetries
from stepmill.pool.tidings import Tidings
from stepmill.spec.errors import EngineBug, EnvTimeout, StepmillError, WorkerDied
from stepmill.spec.options import EnvState, OnFault, PoolOptions
from stepmill.worker.messages import WorkerPlan

_DEATHS = (FaultKind.DIED, FaultKind.TIMED_OUT, FaultKind.NEIGHBOUR)
MAX_PLAYS = 3  # of one episode, where something else than before fails in between


class Recovery:
    """Carries out the policy of a pool. Its methods are called by the pool's thread; restarts run in threads of their own."""

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.restarts = Restarts(plans, backend, options)
        self.capsules = CapsuleDesk(plans, backend, options)
        self.tidings = Tidings(self.restarts, self.capsules, options)
        self._limits = {"step": options.step_timeout_s, "reset": options.reset_timeout_s}
        self._policy = options.on_fault
        self._own_policy = options.on_fault if options.on_raise is None else options.on_raise
        self._repetitions = Repetitions()
        self._retries = ResetRetries(options)
        has_replays = OnFault.REPLAY in (self._policy, self._own_policy)
        self.replays = Replays(plans, backend, options) if has_replays else None

    @property
    def call_log_bytes(self) -> int:
        """What the calls that may have to be repeated take."""
        return 0 if self.replays is None else self.replays.log.size_bytes

    @property
    def ledger(self) -> _native.Ledger:
        """The ledger whose faults these are."""
        return self.restarts.ledger

    def is_replayed(self, server: int) -> bool:
        """Whether an env object's calls are repeated if its worker dies."""
        return self._policy is OnFault.REPLAY and self.replays is not None and self.replays.log.is_whole(server)

    # ---- from native code ---------------------------------------------------------------------------------------

    def on_dead(self, worker: int) -> StepmillError | dict[str, str] | None:
        """Say what becomes of a worker that `send` finds dead: an error, what infos say of its restart, or None to go on."""
        if self._policy is OnFault.REPLAY:
            return None
        delay_s = None if self._policy is OnFault.RAISE else self.restarts.budget.take(worker)
        error = self.tidings.obituary(worker)
        if delay_s is None:
            self.tidings.note(worker)
            return error
        self.restarts.begin(worker, delay_s)
        return fault_info("neighbour", error)

    # ---- from the pool's thread ---------------------------------------------------------------------------------

    def absorb(self) -> list[StepmillError]:
        """Deal with every fault there is; return the errors of those that the policy cannot or must not repair."""
        errors: list[StepmillError] = []
        rows = self.ledger.faults()  # whatever fails again meanwhile is the business of the next round
        tickets = {row[0]: self.ledger.ticket_of(row[0]) for row in rows}
        if self._retries.is_in_new_process:
            for worker in sorted({self.ledger.worker_of(row[0]) for row in rows}):
                errors.extend(self._retry_resets(worker))

        def is_left(row: FaultRow) -> bool:
            """Whether it was not dealt with when its worker was replaced for another."""
            return self.ledger.is_pending(row[0]) and self.ledger.ticket_of(row[0]) == tickets[row[0]]

        deaths: dict[int, list[FaultRow]] = {}
        for row in rows:
            if row[1] in _DEATHS:
                deaths.setdefault(self.ledger.worker_of(row[0]), []).append(row)
            elif is_left(row):
                errors.extend(self._absorb_own(row))
        for worker, lost in deaths.items():
            left = [row for row in lost if is_left(row)]
            errors.extend(self._absorb_death(worker, left) if left else ())
        return errors

    def bring_back(self, workers: Iterable[int]) -> list[StepmillError]:
        """Before a call: under the policy replay, restart those of these workers that have died, and play their envs again.

        One whose repairs are used up stays dead. Returns the errors that tell so, of commands that it was at.
        """
        errors: list[StepmillError] = []
        for worker in sorted(set(workers)) if self._policy is OnFault.REPLAY else ():
            while self.restarts.is_gone(worker) and not self.restarts.is_restarting(worker):
                num_done = self.restarts.num_done
                if self._retries.is_in_new_process:
                    errors.extend(self._retry_resets(worker))
                is_tried = self.restarts.num_done > num_done  # and what became of that is asked anew
                if not is_tried and self.restarts.is_dead(worker) and not self._bring_back(worker, errors):
                    break
        return errors

    def _bring_back(self, worker: int, errors: list[StepmillError]) -> bool:
        """Try once; return whether there are repairs left."""
        rows = [row for row in self.ledger.faults() if row[1] in _DEATHS and self.ledger.worker_of(row[0]) == worker]
        if rows:
            told = self._absorb_death(worker, rows)
            errors.extend(told)
            return not told
        delay_s = self.restarts.budget.take(worker)
        if delay_s is not None:
            self._replay_worker(worker, self.tidings.obituary(worker), delay_s)
        return delay_s is not None

    def revive(self, env_ids: Sequence[int], *, wait: bool = True, anew: bool = False) -> None:
        """Restart the dead workers of these envs; all envs of such a worker must be reset then. `anew`: the living, too.

        With `wait=False` nobody waits: commands wait for the worker, and if it cannot be started they become its fault.

        Raises:
            EnvError, EnvTimeout, WorkerDied: the worker could not be started. Not with `wait=False`.
        """
        for worker in sorted({self.ledger.worker_of(env_id) for env_id in env_ids}):
            if self.restarts.is_restarting(worker) and not wait:
                continue
            self.restarts.wait(worker)
            is_known = self.restarts.is_dead(worker) and not wait
            if anew or is_known or worker in self.restarts.told:
                # Buried now: a command that is sent while its successor starts must not be condemned.
                self.restarts.end(worker)
            if self.restarts.is_gone(worker):
                self._write_off(worker, env_ids)
                self.restarts.told.discard(worker)  # what comes next of it is news
                if self.replays is not None:
                    self.replays.begin_anew(self.ledger, worker, self.restarts.orders(worker))
                if wait:
                    self._restart_now(worker)
                else:
                    self.restarts.begin(worker, 0.0, tries_again=False)
        self.ledger.renew(list(env_ids))

    def _restart_now(self, worker: int) -> None:
        try:
            self.restarts.restart(worker)
        except StepmillError as error:
            raise self.capsules.keep_start(error).with_traceback(None) from error.__cause__

    def prepare_reset(self, env_ids: Sequence[int]) -> None:
        """Before a reset of these envs: bring back those that are lost.

        Raises:
            WorkerDied: others are lost with them, and nobody was told. The next reset finds that told.
            EnvError, EnvTimeout: a worker could not be started.
        """
        lost = self.tidings.lost_among(env_ids)
        if lost:
            self.revive(lost)

    def _write_off(self, worker: int, env_ids: Sequence[int]) -> None:
        """What the worker's envs were at is lost: who waits is FAULTED, who has a result yet to be received hears of it next.

        A fault of an env that is not one of these is still to be told, by the call that waits for it.
        """
        faulted = [row[0] for row in self.ledger.faults() if self.ledger.worker_of(row[0]) == worker]
        self.ledger.fail([env_id for env_id in faulted if env_id in env_ids])
        self.ledger.fail_worker(worker)
        self.ledger.lose_envs(self.ledger.envs_of(worker), fault_info("neighbour", self.restarts.obituary(worker)))

    # ---- one env, one worker ------------------------------------------------------------------------------------

    def _absorb_own(self, row: FaultRow) -> list[StepmillError]:
        env_id = row[0]
        error = self.capsules.keep(fault_error(row), env_id, kind_of(row[1]))
        is_exhausted = self._retries.is_used_up_by(row, error)
        is_final = is_exhausted or self._own_policy is OnFault.RAISE or row[1] == FaultKind.INTERRUPTED
        delay_s = None if is_final else self.restarts.budget.take(self.ledger.worker_of(env_id))
        if delay_s is None:
            self.ledger.fail([env_id])
            return [after_attempts(error, self._retries.max_attempts) if is_exhausted else error]
        self.restarts.pause(delay_s)
        if self._own_policy is OnFault.REPLAY:
            self._replay_own(env_id, error)
        else:
            self.ledger.truncate(env_id, fault_info("raised", error))
        return []

    def _retry_resets(self, worker: int) -> list[StepmillError]:
        """Restart a worker in which resets failed, and give them again; its other envs are neighbours of a death."""
        mine = [row for row in self.ledger.faults() if self.ledger.worker_of(row[0]) == worker]
        failed = [row for row in mine if row[1] in RETRIED and self.ledger.log_place(self.ledger.server_of(row[0]))[4]]
        if not failed or self.restarts.is_restarting(worker):
            return []
        errors: list[StepmillError] = []
        for row in failed:
            if not self._retries.take(row[0], self.ledger.ticket_of(row[0])):
                error = self._death_error(worker, [row]) if row[1] in _DEATHS else fault_error(row)
                error = self.capsules.keep(error, row[0], kind_of(row[1]))
                errors.append(after_attempts(error, self._retries.max_attempts))
                self.ledger.fail([row[0]])
        again = [row for row in failed if self.ledger.is_pending(row[0])]
        if again and not self.restarts.pause(self._retries.wait_s):
            self._restart_for(
                worker, self._death_error(worker, again) if again[0][1] in _DEATHS else fault_error(again[0])
            )
            for row in again:
                self._retries.note(row[0], self.ledger.ticket_of(row[0]))
        return errors

    def _restart_for(self, worker: int, error: StepmillError) -> None:
        self.restarts.end(worker)
        info = fault_info("neighbour", error)
        if self._policy is not OnFault.REPLAY:
            self.ledger.lose_envs(self.ledger.envs_of(worker), info)
        try:
            self.restarts.restart(worker, is_played=self._policy is OnFault.REPLAY)
        except StepmillError as failure:
            self.restarts.note_failure(worker, failure)
            return
        if self._policy is OnFault.REPLAY:
            self._recall(worker)
            self._replay_all(worker, self.ledger.envs_of(worker), error)
            return
        for row in self.ledger.faults():
            if self.ledger.worker_of(row[0]) == worker:
                self.ledger.truncate(row[0], info)

    def _replay_own(self, env_id: int, error: StepmillError) -> None:
        self._note_failure(env_id, error)
        worker = self.ledger.worker_of(env_id)
        if self.restarts.is_dead(worker) or self._needs_replacement(env_id):
            self._replace(worker, error)
            return
        try:
            self._replay(env_id, fault_info("raised", error), is_new=False)
        except BaseException:  # Ctrl-C: where the env stands nobody knows
            self.ledger.abandon(env_id)
            raise

    def _replace(self, worker: int, error: StepmillError) -> None:
        """End a worker, since no reset makes its env what it was; play all its envs again in a new one."""
        assert self.replays is not None
        self.replays.wait_for_calls(worker)
        self._replay_worker(worker, error, 0.0)

    def _absorb_death(self, worker: int, rows: Sequence[FaultRow]) -> list[StepmillError]:
        error = self.restarts.take_failure(worker) or self._death_error(worker, rows)
        is_over = not self.restarts.is_dead(worker) or self.restarts.is_restarting(
            worker
        )  # they are of a death dealt with
        if is_over and self._policy is OnFault.TRUNCATE:
            self._truncate(rows, error)
            return []
        if is_over and self._policy is OnFault.REPLAY:
            self._replay_all(worker, [row[0] for row in rows], error)
            return []
        error = error if is_over else self.capsules.keep_death(error, worker, [row[0] for row in rows])
        delay_s = None if self._policy is OnFault.RAISE else self.restarts.budget.take(worker)
        if delay_s is None:
            self.ledger.fail([row[0] for row in rows])
            if not is_over:
                self.tidings.note(worker)
                self.ledger.fail_worker(worker)
            return [error]
        if self._policy is OnFault.REPLAY:
            self._note_failure(self._culprit_of(worker, error), error)
            self._replay_worker(worker, error, delay_s)
            return []
        self._settle(worker)
        self.ledger.lose_envs(self.ledger.envs_of(worker), fault_info("neighbour", error))
        self.restarts.begin(worker, delay_s)
        self._truncate(rows, error)
        return []

    def _settle(self, worker: int) -> None:
        """See to it that nothing is left of what a dead worker was commanded: its successor would take it for its own.

        Nothing ever is, unless it died over a result, or has scribbled over its words.
        """
        states = self.ledger.states()
        if any(states[env_id] == EnvState.BUSY for env_id in self.ledger.envs_of(worker)):
            with contextlib.suppress(StepmillError):  # it does not even die of SIGKILL, which its restart will tell
                self.restarts.end(worker)

    def _truncate(self, rows: Sequence[FaultRow], error: StepmillError) -> None:
        for env_id, kind, _ in rows:
            self.ledger.truncate(env_id, fault_info(FaultKind(kind).name.lower(), error))

    def _replay_worker(self, worker: int, error: StepmillError, delay_s: float) -> None:
        if self.restarts.pause(delay_s):
            return
        try:
            self.restarts.restart(worker, is_played=True)
        except StepmillError as failure:
            self.restarts.note_failure(worker, failure)
            return  # it is still dead: the next round takes from the budget again
        self._recall(worker)
        self._replay_all(worker, self.ledger.envs_of(worker), error)

    def _culprit_of(self, worker: int, error: StepmillError) -> int | None:
        """Which env a worker was at when it died; None if it was at none, or could not be started."""
        running = self.ledger.running_env(worker)
        if isinstance(error, EnvTimeout):  # a worker that was stopped took no command: then nobody knows who would hang
            return running if running == error.env_id else None
        return running if isinstance(error, WorkerDied) and running >= 0 else None

    def _note_failure(self, env_id: int | None, error: StepmillError) -> None:
        """Note an env's failure in a step. A reset is given again, not played again."""
        if env_id is None or not self.ledger.is_pending(env_id):
            return
        server = self.ledger.server_of(env_id)
        episode, length, _, _, is_between, _ = self.ledger.log_place(server)
        if not is_between:
            ticket = self.ledger.ticket_of(env_id)
            self._repetitions.note(env_id, (server, episode, length), ticket, error)

    def _recall(self, worker: int) -> None:
        """Make the env objects of a new worker that play no episode now what they were."""
        for server, reason in {} if self.replays is None else self.replays.recall(self.ledger, worker).items():
            self.restarts.restore(worker, [server])
            text = f"env object {server} was built anew, and is not as it was: {reason}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _replay_all(self, worker: int, env_ids: Sequence[int], error: StepmillError) -> None:
        try:
            for env_id in env_ids:
                if self.restarts.is_dead(worker):
                    break  # again: what is pending has become a fault by now
                self._replay(env_id, fault_info("died", error), is_new=True)
        except BaseException:  # Ctrl-C: who was not played again yet stands elsewhere than the user thinks
            self.restarts.end(worker)  # so the next step finds it dead, and plays all of them again
            raise

    def _replay(self, env_id: int, info: dict[str, str], *, is_new: bool) -> None:
        """Bring an env back to where the user believes it is; if that cannot be, cut its episode short, with the reason."""
        if self.replays is None:
            raise EngineBug("only the policy 'replay' plays episodes again")
        has_log = self.ledger.can_replay(env_id)
        is_waiting = self.ledger.is_pending(env_id)
        self.replays.begin()
        reason = self._repetitions.take_reason(env_id) or self._play(env_id, is_new=is_new)
        if reason is None:
            return
        server = self.ledger.server_of(env_id)
        if is_new:
            self.replays.make_rest(server)
        with contextlib.suppress(StepmillError):  # it has died again, which the next round finds
            self.restarts.restore(self.ledger.worker_of(env_id), [server])
        info = {**info, "not_replayable": reason}
        if is_waiting:
            self.ledger.truncate(env_id, info)
        else:
            self.ledger.lose_envs([env_id], info)
        if has_log:
            text = f"env {env_id} is not replayable: {reason}; its episode is cut short"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _play(self, env_id: int, *, is_new: bool) -> str | None:
        """Play an env's episode again, more than once if need be; return why it cannot be."""
        assert self.replays is not None
        worker = self.ledger.worker_of(env_id)
        reason = self.replays.play(self.ledger, env_id, is_new=is_new)
        for _ in range(MAX_PLAYS - 1):
            if reason != FAILED_BETWEEN:
                break
            if self._needs_replacement(env_id):  # which is the business of whoever finds it dead
                self._repetitions.excuse(env_id)
                self.restarts.end(worker)
                return None
            delay_s = self.restarts.budget.take(worker)
            if delay_s is None or self.restarts.pause(delay_s):
                break
            # The object has the calls from before the episode by now.
            reason = self.replays.play(self.ledger, env_id, is_new=False)
        return reason

    def _needs_replacement(self, env_id: int) -> bool:
        """Whether calls have left marks on an env that lives on, which no reset takes back but a new worker does."""
        can_replace = self._policy is OnFault.REPLAY and self.restarts.can_replace_living
        return can_replace and self.replays is not None and self.replays.has_marks(self.ledger, env_id)

    def _death_error(self, worker: int, rows: Sequence[FaultRow]) -> StepmillError:
        late = [row for row in rows if row[1] == FaultKind.TIMED_OUT]
        if not late:
            return self.restarts.obituary(worker)
        phase = "reset" if self.ledger.was_at_reset(late[0][0]) else "step"
        return late_error(late[0][0], self.ledger.envs_of(worker), phase, self._limits[phase])
