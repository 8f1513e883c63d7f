"""Carries out replays: repeats the calls of an env, lets the pool state play its log, and compares the results.

    begin ─► calls before the episode ─► begin_replay ─► ReplayAt: calls after this step ─► ... ─► ReplayPlayed ─► verify ─► finish
                                                    └► ReplayDiffers, ReplayFailed: the policy decides

No method waits. A worker handles requests in the order in which they were posted, between the commands of the pool state.
Whether they raised as before is compared after the log was played.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepmill.backends.base import Backend, Future
from stepmill.pool.events import ContinueReplay, FinishReplay, Replay
from stepmill.pool.policies.call_log import CallLog, EpisodePosition, LoggedCall
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.errors import EnvTimeout, StepmillError, WorkerDied
from stepmill.spec.options import PoolOptions
from stepmill.worker.calls import MODIFYING_KINDS, SETTING_KINDS
from stepmill.worker.messages import Request, RequestKind, Value, WorkerPlan, load

TICKETS = 1 << 32  # they wrap around
INCOMPLETE_LOG = "its calls are more than half of replay_log_bytes holds, or cannot be pickled"


class CallDiffers(Exception):
    """A repeated call raised and had not raised before, or the other way round."""


@dataclass(eq=False)
class RepeatedCalls:
    """Calls that were repeated on one env object, to be compared with the first time.

    Attributes:
        server: the env object.
        posted: the calls, and the futures of their repetition.
        staged: calls to be repeated after the reset of the object's next episode.
        num_verified: how many of `posted` had the same outcome.
        is_awaited: whether a thread waits for the futures, to notify the pool's thread.
    """

    server: int
    posted: list[tuple[LoggedCall, Future]] = field(default_factory=list)
    staged: list[LoggedCall] = field(default_factory=list)
    num_verified: int = 0
    is_awaited: bool = False


@dataclass(eq=False)
class EpisodeReplay(RepeatedCalls):
    """One env whose episode is replayed.

    Attributes:
        env_id: the env that the object serves.
        info: `info["fault"]`, in case the episode cannot be replayed.
        is_new: whether the object was rebuilt, so that calls from before the episode are repeated, too.
        placed: calls with their places, from the first command of the log on.
        num_plays: how often the replay was begun.
        first_ticket: ticket of the reset that began the last play.
    """

    env_id: int = 0
    info: dict[str, str] = field(default_factory=dict)
    is_new: bool = False
    placed: list[tuple[int, LoggedCall]] = field(default_factory=list)
    num_plays: int = 0
    first_ticket: int = 0


class EpisodeReplayer:
    """Carries out replays. Used by the pool's thread."""

    def __init__(
        self, workers: WorkerSupervisor, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions
    ) -> None:
        self._workers = workers
        self._backend = backend
        self._limit_bytes = options.replay_log_bytes
        self._locations = {env: (plan.worker, place) for plan in plans for place, env in enumerate(plan.env_ids)}
        self._plans = plans
        self._ids = itertools.count(-1, -1)  # of repeated requests; those of the user count upwards
        self.log = CallLog(len(self._locations), options.replay_log_bytes // 2)

    # ---- the log ----------------------------------------------------------------------------------------------------

    def add_request(self, servers: Sequence[int], future: Future) -> None:
        """Log a request that was posted for these env objects, if it may change them."""
        request = future.request
        if request.kind not in MODIFYING_KINDS:
            return
        for position, server in enumerate(servers):
            at = EpisodePosition.of(self._workers.state, server)
            self.log.add(server, request, future, position, (at.episode, at.next_place))
        self._share_memory()

    def restart_log(self, worker: int) -> None:
        """Clear the log of a worker whose envs will be rebuilt without a replay, which get only their settings."""
        servers = self._plans[worker].env_ids
        for server in servers:
            self.log.clear(server)
        for request in self._workers.settings_of(servers[0]).requests(servers):
            for position, place in enumerate(request.servers):
                self.log.add(servers[place], request, None, position, (-1, 0))
        self._share_memory()

    def _share_memory(self) -> None:
        """Let the logs of episodes use the memory that the calls do not use."""
        self._workers.state.limit_logs(max(self._limit_bytes - self.log.size_bytes, 0))

    def was_modified(self, env_id: int) -> bool:
        """Whether a living env got calls or settings since its episode began, which a reset does not undo."""
        position, placed = self.log.placed(self._workers.state, self._workers.state.server_of(env_id))
        return any(place > position.first for place, _ in placed)

    def open_calls(self, worker: int) -> list[Future]:
        """Return the futures of logged calls that have no reply yet."""
        calls = [call for server in self._plans[worker].env_ids for call in self.log.calls_of(server)]
        return [call.future for call in calls if call.future is not None]

    # ---- envs without an episode ------------------------------------------------------------------------------------

    def repeat_waiting(self, worker: int) -> list[RepeatedCalls]:
        """Repeat the calls of a restarted worker's env objects that have no episode to replay: spares, and envs never reset."""
        state = self._workers.state
        suspended = {state.server_of(env_id) for env_id in state.suspended_envs()}
        waiting = [server for server in self._plans[worker].env_ids if server not in suspended]
        return [self._repeat_waiting(server) for server in waiting if self.log.is_whole(server)]

    def _repeat_waiting(self, server: int) -> RepeatedCalls:
        state = self._workers.state
        position, placed = self.log.placed(state, server)
        repeated = RepeatedCalls(server)
        for place, call in placed:
            if place <= position.first or not position.is_reset_ahead:
                self._repeat(repeated, call)
            else:
                repeated.staged.append(call)
        return repeated

    def post_staged_calls(self, repeated: RepeatedCalls) -> None:
        """Repeat calls that came after the reset of an episode that was begun in advance. The worker serves."""
        for call in repeated.staged:
            self._post(repeated.server, call, self._workers.state.ticket_of_server(repeated.server))

    # ---- replays ----------------------------------------------------------------------------------------------------

    def begin(self, replay: EpisodeReplay) -> str | None:
        """Begin a replay of a suspended env; return why it cannot be replayed, or None.

        If its pending command is a reset, the reset is repeated and the replay is over: the env is no longer suspended.
        """
        state, server = self._workers.state, replay.server
        replay.num_plays += 1
        replay.posted, replay.num_verified = [], 0
        replay.is_awaited = False
        position, placed = self.log.placed(state, server)
        reason = self._why_not(replay, position, placed)
        if reason is not None:
            return reason
        for place, call in placed:
            is_undone = (
                not position.is_between and call.kind in SETTING_KINDS
            )  # it may have been set to another value later
            if place <= position.first and (replay.is_new or is_undone):
                self._repeat(replay, call)
        since = [(place, call) for place, call in placed if place > position.first]
        if position.is_between and not replay.is_new:
            for _, call in since:  # the object got them before the reset that is repeated
                call.place = position.length
            since = []
        replay.placed = since
        places = sorted({place for place, _ in since})
        state.apply([Replay(replay.env_id, state.ticket_of(replay.env_id), places)])
        if position.is_pending and position.is_between:  # the reset was repeated
            self._post_later_calls(replay)
        replay.first_ticket = state.ticket_of(replay.env_id)
        return None

    def step_of(self, replay: EpisodeReplay) -> int:
        """Return the number of the last command of a replay; that of its reset is 0."""
        return (self._workers.state.ticket_of(replay.env_id) - replay.first_ticket) % TICKETS

    def _why_not(
        self, replay: EpisodeReplay, position: EpisodePosition, placed: Sequence[tuple[int, LoggedCall]]
    ) -> str | None:
        if not self.log.is_whole(replay.server):
            return INCOMPLETE_LOG
        if position.is_between:
            return None
        if not self._workers.state.can_replay(replay.env_id):
            return "its log is incomplete: it was too long or cut short, or the actions have no fixed size"
        is_called = any(place > position.first and call.kind is RequestKind.CALL for place, call in placed)
        if is_called and not replay.is_new:
            return "it was called since its episode began, and only a new worker process could undo that"
        return None

    def continue_at(self, replay: EpisodeReplay, place: int) -> None:
        """Repeat the calls of a place, and continue to play the log."""
        state = self._workers.state
        for each, call in replay.placed:
            if each == place:
                self._repeat(replay, call, state.ticket_of(replay.env_id))
        state.apply([ContinueReplay(replay.env_id, state.ticket_of(replay.env_id))])

    def finish(self, replay: EpisodeReplay) -> None:
        """Resume an env that is rebuilt, and send it its pending commands."""
        state = self._workers.state
        state.apply([FinishReplay(replay.env_id, state.ticket_of(replay.env_id))])
        self._post_later_calls(replay)

    def _post_later_calls(self, replay: EpisodeReplay) -> None:
        state = self._workers.state
        length = EpisodePosition.of(state, replay.server).length
        for place, call in replay.placed:
            if place > length:  # it came after the pending command, which was sent again
                self._post(replay.server, call, state.ticket_of(replay.env_id))

    def give_up(self, replay: EpisodeReplay) -> None:
        """Make the missing calls of an env that cannot be replayed, so that its next episode can be."""
        made = {id(call) for call, _ in replay.posted}
        for call in self.log.calls_of(replay.server) if replay.is_new else ():
            if id(call) not in made:
                self._post(replay.server, call, 0)
        self._workers.reapply_settings(self._locations[replay.server][0], [replay.server])

    def verify(self, repeated: RepeatedCalls) -> bool:
        """Compare the outcomes of repeated calls; return whether all have arrived.

        If one has not, a thread waits for it and then ends the pool's wait.

        Raises:
            CallDiffers: a call raised and had not raised before, or the other way round.
        """
        while repeated.num_verified < len(repeated.posted):
            call, future = repeated.posted[repeated.num_verified]
            try:
                outcome = future.result(0.0)[0]
            except EnvTimeout:
                self._await(repeated)
                return False
            except WorkerDied:
                return False  # the replay is repeated after the next restart
            call.update()
            if call.has_raised is not None and isinstance(outcome, Value) is call.has_raised:
                raise CallDiffers(
                    f"the call of {call.name!r} {'succeeded' if call.has_raised else 'raised'} when it was repeated, unlike before"
                )
            repeated.num_verified += 1
        return True

    def _await(self, repeated: RepeatedCalls) -> None:
        if repeated.is_awaited:
            return
        repeated.is_awaited = True
        futures = [future for _, future in repeated.posted[repeated.num_verified :]]
        notify = self._workers.state.notify

        def wait() -> None:
            for future in futures:
                with contextlib.suppress(StepmillError):
                    future.result()
            repeated.is_awaited = False
            notify()

        threading.Thread(target=wait, name="stepmill-replayed-calls", daemon=True).start()

    def _repeat(self, repeated: RepeatedCalls, call: LoggedCall, ticket: int = 0) -> None:
        repeated.posted.append((call, self._post(repeated.server, call, ticket)))

    def _post(self, server: int, call: LoggedCall, ticket: int) -> Future:
        worker, place = self._locations[server]
        request = Request(next(self._ids), call.kind, (place,), (ticket,), load(call.payload))
        return self._backend.call({worker: request})[0]
