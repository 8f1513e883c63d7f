"""The replays that are in progress: the calls that they repeat, and the decisions that continue them.

    begin ─► calls before the episode ─► Replay ─► ReplayAt: calls after this step ─► ... ─► ReplayPlayed ─► ContinueReplay
                                            └─► ReplayDiffers, ReplayFailed: play again, or ResolveFault(CUT)

The core itself plays the log of an episode (`replay.cpp`). If a replay repeats no calls, and did not fail before, the core
also finishes it, and Python sees none of these events. No method waits or calls `apply`. A worker handles requests in the order in which they
were posted, between the commands of the core. Calls that precede a command are therefore posted before its decision is
applied. After the log was played, the outcomes of the calls are compared with those of the first time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from stepmill.backends.base import Backend, Future
from stepmill.pool.call_log import LoggedCall
from stepmill.pool.events import (
    BeginRestart,
    ContinueReplay,
    Decision,
    Event,
    Remedy,
    Replay,
    ReplayAt,
    ReplayDiffers,
    ReplayPaused,
    ReplayPlayed,
    ResolveFault,
    ServerView,
)
from stepmill.pool.workers import WorkerState, WorkerSupervisor
from stepmill.spec.errors import EnvError, EnvTimeout, StepmillError, WorkerDied
from stepmill.spec.options import OnFault, PoolOptions
from stepmill.worker.calls import MODIFYING_KINDS, SETTING_KINDS, UnreadablePayload
from stepmill.worker.messages import Request, RequestKind, Value, load, server_locations

TICKETS = 1 << 32  # tickets wrap around at this number
MAX_PLAYS = 3  # how often an episode is replayed for one command, if the env raises in each replay
MAX_SAME_FAILURES = 2  # failures of one kind in one step; another replay would fail, too
MAX_SAME_SIGNALS = 3  # the same for signals from other processes, which may be a coincidence
_SIGNALS_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
INCOMPLETE_LOG = "its calls take more than half of restarts.replay_log_bytes, or cannot be pickled"
ONLY_READS = "; if it only reads, use get_attr with a function of the env, which is not repeated"

Effect = Callable[[], object]


@dataclass(eq=False)
class RepeatedCalls:
    """Calls that were repeated on one env object, whose outcomes are compared with the first ones.

    Attributes:
        server: the env object.
        posted: the calls, and the futures of their repetitions.
        is_awaited: whether a thread waits for the futures, to notify the pool's thread.
    """

    server: int
    posted: list[tuple[LoggedCall, Future]] = field(default_factory=list)
    is_awaited: bool = False


@dataclass(eq=False)
class EpisodeReplay(RepeatedCalls):
    """One env whose episode is replayed.

    Attributes:
        env_id: the env that the object serves.
        info: the `info["fault"]` in case the episode cannot be replayed.
        is_new: whether the object was rebuilt, so that calls before the episode are repeated, too.
        placed: calls with their places, from the first command of the log on.
        first_ticket: the ticket of the reset that began the last play.
    """

    env_id: int = 0
    info: Mapping[str, str] = field(default_factory=dict)
    is_new: bool = False
    placed: list[tuple[int, LoggedCall]] = field(default_factory=list)
    first_ticket: int = 0


class RepeatedFailures:
    """Counts, per env, consecutive failures of one kind in one step."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[int, ...], str, int, int]] = {}  # place, kind, number and ticket
        self._reasons: dict[int, str] = {}

    def record(self, env_id: int, place: tuple[int, ...], ticket: int, error: StepmillError) -> None:
        """Count a failure at a place, a tuple (env object, episode, step).

        If a worker dies before its env is replayed, the failure is found a second time, with the same ticket.
        """
        last_place, last_what, count, last_ticket = self._last.get(env_id, ((), "", 0, None))
        if last_ticket == ticket:
            return
        what = _kind_of(error)
        count = count + 1 if (last_place, last_what) == (place, what) else 1
        if count >= (MAX_SAME_SIGNALS if what in _SIGNALS_FROM_OUTSIDE else MAX_SAME_FAILURES):
            self._reasons[env_id] = f"step {place[-1]} failed in the same way when it was replayed ({what})"
        self._last[env_id] = place, what, count, ticket

    def pop_reason(self, env_id: int) -> str | None:
        """Return once why another replay would not help, or None if it may help."""
        return self._reasons.pop(env_id, None)


def _kind_of(error: StepmillError) -> str:
    """Return a key that is equal for errors of the same cause. The text is not part of it: it may contain times."""
    if isinstance(error, EnvError):
        return error.error_type
    if isinstance(error, WorkerDied):
        return error.signal_name or f"exit code {error.exit_code}"
    return type(error).__name__


class Replays:
    """The replays of a pool's envs, which repeat the calls in the log of its workers. Only the pool's thread uses it.

    `is_on` says whether the options ask for replays. If not, no call is logged.
    """

    def __init__(
        self,
        workers: WorkerSupervisor,
        backend: Backend,
        options: PoolOptions,
        *,
        on_reset_repeated: Callable[[int], object],
        warn: Callable[[str], object],
    ) -> None:
        """Store what replays need.

        Args:
            workers, backend, options: those of the pool.
            on_reset_repeated: a function that is called with an env after its reset was repeated in place of a replay.
            warn: a function that stores a warning for the user.
        """
        self._workers = workers
        self._backend = backend
        self._limit_bytes = options.restarts.replay_log_bytes
        self._rebuilds_workers = options.on_fault is OnFault.REPLAY
        self.is_on = OnFault.REPLAY in (options.on_fault, options.restarts.on_raise)
        self.after_apply: list[Effect] = []  # to be called once the decisions that a method returned are applied
        self._on_reset_repeated = on_reset_repeated
        self._warn = warn
        self._locations = server_locations([record.plan for record in workers.records])
        self._ids = itertools.count(-1, -1)  # ids of repeated requests; those of the user count upwards
        self._failures = RepeatedFailures()
        self._replays: dict[int, EpisodeReplay] = {}  # by env; the core may have finished some of them
        # By env whose replay has not ended: the (episode, length) of the last play in which it raised, and how often there.
        self._num_raised: dict[int, tuple[tuple[int, int], int]] = {}
        self.reasons: dict[int, str] = {}  # by env: why its last replay that did not succeed was given up
        self._unverified: list[RepeatedCalls] = []  # those of envs that are not suspended
        self.log = workers.log

    # ---- the log ----------------------------------------------------------------------------------------------------

    def add_request(self, servers: Sequence[int], future: Future) -> None:
        """Log a request that was posted for these env objects, if it may change them."""
        request = future.request
        if not self.is_on or request.kind not in MODIFYING_KINDS:
            return
        for position, view in enumerate(self._workers.state.view(servers)):
            self.log.add(view.server, request, future, position, (view.episode, view.length + view.is_ahead))
        self._share_memory()

    def restart_log(self, worker: int) -> None:
        """Clear the log of a worker whose envs will be rebuilt without a replay, and get only their settings."""
        plan = self._workers.records[worker].plan
        lanes = list(plan.lanes.values())
        for server in plan.env_ids:
            self.log.clear(server)
        for request in self._workers.records[worker].settings.requests(plan.env_ids):
            for position, place in enumerate(request.servers):
                self.log.add(lanes[request.lane][place], request, None, position, (-1, 0))
        self._share_memory()

    def _share_memory(self) -> None:
        """Let the logs of episodes use the memory that the log of calls does not use."""
        self._workers.state.limit_logs(max(self._limit_bytes - self.log.size_bytes, 0))

    def needs_new_object(self, view: ServerView) -> bool:
        """Return whether a living env must be rebuilt, because it got calls in its episode, which a reset does not undo."""
        if not (self._rebuilds_workers and self._workers.can_restart_living):
            return False
        return any(place > view.first_place for place, _ in self.log.placed(view))

    def wait_for_calls(self, worker: int) -> Effect:
        """Return a function that waits for the replies to calls that a worker can still send if it lives."""
        calls = [call for server in self._workers.records[worker].plan.env_ids for call in self.log.calls_of(server)]
        return partial(_await_replies, [call.future for call in calls if call.future is not None])

    # ---- failures ---------------------------------------------------------------------------------------------------

    def record_failure(self, view: ServerView, error: StepmillError) -> None:
        """Count a failure of an env in a step, which may be replayed. Resets are repeated, and not replayed."""
        env_id = view.env_id
        replay = self._replays.get(env_id) if env_id is not None and view.is_suspended else None
        if env_id is None or view.is_between or (replay is None and not view.is_pending):
            return
        step = view.length if replay is None else (view.ticket - replay.first_ticket) % TICKETS
        self._failures.record(env_id, (view.server, view.episode, step), view.ticket, error)

    # ---- envs without an episode ------------------------------------------------------------------------------------

    def repeat_waiting(self, view: ServerView) -> None:
        """Repeat the calls of a rebuilt env object without an episode to replay, such as a spare or an env that was never reset."""
        if not self.log.is_whole(view.server):
            return
        repeated, staged = RepeatedCalls(view.server), []
        for place, call in self.log.placed(view):
            if place <= view.first_place or not (view.is_between and view.is_ahead):
                self._repeat(repeated, call)
            else:
                staged.append(call)
        self._unverified.append(repeated)
        self._post_later(view.server, staged)

    def check_calls(self) -> None:
        """Verify repeated calls of envs without a replay, if their replies have arrived since the last check."""
        waiting, self._unverified = self._unverified, []
        for repeated in waiting:
            worker = self._worker_of(repeated)
            if self._workers.records[worker].state is not WorkerState.SERVING:
                continue
            differences = self._compare(repeated)
            if differences is None:
                self._unverified.append(repeated)
            elif differences:
                self._workers.reapply_settings(worker, [repeated.server])
                text = differences[0][1]
                self._warn(f"env object {repeated.server} was rebuilt, but its state may differ: {text}")

    # ---- replays ----------------------------------------------------------------------------------------------------

    def begin(self, view: ServerView, info: Mapping[str, str], *, is_new: bool) -> list[Decision]:
        """Begin the replay of an env that is suspended, or that the previous decision will suspend."""
        env_id = view.env_id
        if env_id is None:
            return []
        replay = self._replays[env_id] = EpisodeReplay(view.server, env_id=env_id, info=info, is_new=is_new)
        reason = self._failures.pop_reason(env_id)
        return self._play(replay, view) if reason is None else self._cut_short(replay, view, reason)

    def _play(self, replay: EpisodeReplay, view: ServerView) -> list[Decision]:
        replay.posted, replay.is_awaited = [], False
        placed = self.log.placed(view)
        reason = self._why_not(replay, view, placed)
        if reason is not None:
            return self._cut_short(replay, view, reason)
        for place, call in placed:
            # A setting that was made before the episode may have been set to another value later.
            is_undone = not view.is_between and call.kind in SETTING_KINDS
            if place <= view.first_place and (replay.is_new or is_undone):
                self._repeat(replay, call)
        since = [(place, call) for place, call in placed if place > view.first_place]
        if view.is_between and not replay.is_new:
            for _, call in since:  # the object got these calls before the reset that is repeated
                call.place = view.length
            since = []
        replay.placed = since
        replay.first_ticket = (view.ticket + 1) % TICKETS
        if view.is_pending and view.is_between:  # the reset is repeated instead
            self._end(replay)
            self._unverified.append(replay)
            self._post_later(view.server, [call for place, call in since if place > view.length])
            self.after_apply.append(partial(self._on_reset_repeated, replay.env_id))
        places = sorted({place for place, _ in since})
        is_finished_by_core = not (since or replay.posted or replay.env_id in self._num_raised)
        return [Replay(replay.env_id, view.ticket, places, is_finished_by_core)]

    def _why_not(self, replay: EpisodeReplay, view: ServerView, placed: Sequence[tuple[int, LoggedCall]]) -> str | None:
        if not self.log.is_whole(replay.server):
            return INCOMPLETE_LOG
        if view.is_between:
            return None
        if not view.is_logged:
            limit = f"restarts.replay_log_bytes={self._limit_bytes}"
            return f"its log is incomplete: it grew over {limit}, or was cut short"
        calls = [call for place, call in placed if place > view.first_place and call.kind is RequestKind.CALL]
        if calls and not replay.is_new:
            return "it was called since its episode began, and only a new worker process could undo that"
        return None

    def advance(self, events: Iterable[Event]) -> list[Decision]:
        """Decide about replays that have reached a place or their end, or have failed."""
        decisions: list[Decision] = []
        for event in events:
            if isinstance(event, ReplayPaused) and event.env_id in self._replays:
                decisions += self._advance(self._replays[event.env_id], event)
        return decisions

    def _worker_of(self, repeated: RepeatedCalls) -> int:
        return self._workers.worker_of_server[repeated.server]

    def _advance(self, replay: EpisodeReplay, event: ReplayPaused) -> list[Decision]:
        if isinstance(event, ReplayAt):
            for place, call in replay.placed:
                if place == event.step:
                    self._repeat(replay, call, event.ticket)
            return [ContinueReplay(event.env_id, event.ticket)]
        view = self._workers.view_of(event.env_id)
        if isinstance(event, ReplayPlayed):
            return self._finish(replay, view)
        if isinstance(event, ReplayDiffers):
            return self._cut_short(replay, view, f"step {event.step} gave another result than before")
        record = self._workers.check_process(view.worker)
        if record.state is not WorkerState.SERVING:
            return []  # all its envs are replayed after the restart
        key = view.episode, view.length
        last, num_raised = self._num_raised.get(replay.env_id, (key, 0))
        num_raised = num_raised + 1 if last == key else 1
        self._num_raised[replay.env_id] = key, num_raised
        if num_raised >= MAX_PLAYS:
            return self._cut_short(replay, view, "it raised in between")  # at steps that did not fail before
        if self.needs_new_object(view):
            self.drop(view.worker)  # all begin again after the restart
            return [BeginRestart(view.worker, record.generation, Remedy.KEEP, replay.info)]
        replay.is_new = False  # the calls from before the episode have been repeated
        return self._play(replay, view)

    def _finish(self, replay: EpisodeReplay, view: ServerView) -> list[Decision]:
        differences = self._compare(replay)
        if differences is None:
            return []
        for call, text in differences:
            if call.is_repeatable(view):
                return self._cut_short(replay, view, text)
        for _, text in differences:
            self._warn(f"env {replay.env_id} was rebuilt, but its state may differ: {text}")
        self._end(replay)
        # These calls come after the pending command, which is sent again.
        self._post_later(view.server, [call for place, call in replay.placed if place > view.length])
        return [ContinueReplay(replay.env_id, view.ticket)]

    def _cut_short(self, replay: EpisodeReplay, view: ServerView, reason: str) -> list[Decision]:
        """Cut short an episode that cannot be replayed. The object gets its missing calls for replays of later episodes."""
        made = {id(call) for call, _ in replay.posted}
        for call in self.log.calls_of(replay.server) if replay.is_new else ():
            if id(call) not in made:
                self._post(replay.server, call, 0)
        self._workers.reapply_settings(view.worker, [replay.server])
        self._end(replay)
        self.reasons[replay.env_id] = reason
        if view.is_logged:
            self._warn(f"env {replay.env_id} is not replayable: {reason}; its episode is cut short")
        return [ResolveFault(replay.env_id, view.ticket, Remedy.CUT, {**replay.info, "not_replayable": reason})]

    def _end(self, replay: EpisodeReplay) -> None:
        """Forget a replay that has ended, and how often the env raised in it."""
        del self._replays[replay.env_id]
        self._num_raised.pop(replay.env_id, None)

    def drop(self, worker: int) -> None:
        """Drop the replays of a worker that is about to be restarted, or stays dead."""
        self._replays = {env_id: each for env_id, each in self._replays.items() if self._worker_of(each) != worker}
        self._unverified = [each for each in self._unverified if self._worker_of(each) != worker]

    # ---- repeated calls ---------------------------------------------------------------------------------------------

    def _compare(self, repeated: RepeatedCalls) -> list[tuple[LoggedCall, str]] | None:
        """Return the repeated calls that raised an exception only the first time or only now, with texts that say so.

        Return None if the outcome of a call has not arrived. A thread then waits for it, and ends the pool's wait.
        """
        differences = []
        for call, future in repeated.posted:
            try:
                outcome = future.result(0.0)[0]
            except EnvTimeout:
                self._await(repeated)
                return None
            except WorkerDied:
                return None  # the replay is repeated after the next restart
            except StepmillError as failure:
                differences.append((call, str(failure)))
                continue
            call.update()
            if call.has_raised is not None and isinstance(outcome, Value) is call.has_raised:
                now = "succeeded" if call.has_raised else "raised"
                hint = ONLY_READS if call.kind is RequestKind.CALL else ""
                differences.append((call, f"the call of {call.name!r} {now} when it was repeated, unlike before{hint}"))
        return differences

    def _await(self, repeated: RepeatedCalls) -> None:
        if repeated.is_awaited:
            return
        repeated.is_awaited = True
        futures = [future for _, future in repeated.posted]
        notify = self._workers.state.notify

        def wait() -> None:
            _await_replies(futures)
            repeated.is_awaited = False
            notify()

        threading.Thread(target=wait, name="stepmill-replayed-calls", daemon=True).start()

    def _repeat(self, repeated: RepeatedCalls, call: LoggedCall, ticket: int = 0) -> None:
        repeated.posted.append((call, self._post(repeated.server, call, ticket)))

    def _post_later(self, server: int, calls: Sequence[LoggedCall]) -> None:
        """Post calls that follow the command that this round's decisions give to the env object."""

        def post() -> None:
            ticket = self._workers.state.view([server])[0].ticket
            for call in calls:
                self._post(server, call, ticket)

        if calls:
            self.after_apply.append(post)

    def _post(self, server: int, call: LoggedCall, ticket: int) -> Future:
        lane, place = self._locations[server]
        try:
            payload = load(call.payload)
        except Exception as exc:  # the user's code, which may need what only the env's process has
            payload = UnreadablePayload(RuntimeError(repr(exc)))
        return self._backend.call({lane: Request(next(self._ids), call.kind, (place,), (ticket,), payload)})[0]


def _await_replies(futures: Iterable[Future]) -> None:
    for future in futures:
        with contextlib.suppress(StepmillError):
            future.result()
