"""What check.py searches: bounds of the model, its mutants, and changes that are known to change nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Sizes of one search of the model, as words.pml names them, and what it is there for."""

    sizes: dict[str, int]
    about: str
    is_cycle_search: bool = False  # also search for executions that never end
    is_for_mutants: bool = False  # too many states to search to the end: mutants fail in them long before

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(f"-D{name}={size}" for name, size in self.sizes.items())


REPLAY = {"REPLAYS": 1, "LIVES": 1, "EAGER": 0}

BOUNDS = {
    "pair": Bounds({"W": 2, "R": 1, "T": 1, "KILLS": 1, "EAGER": 0}, "two workers, one of them dies at any point"),
    "deadline": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "MORTAL": 0, "EAGER": 0},
        "a thread is given up by its deadline, and goes on",
    ),
    "deadline_group": Bounds(
        {"W": 1, "R": 2, "T": 1, "LIMITS": 1, "MORTAL": 0, "NEED": 1, "EAGER": 0},
        "the same with another row beside it, received first or later",
    ),
    "deadline_turns": Bounds(
        {"W": 1, "R": 2, "T": 2, "LIMITS": 1, "MORTAL": 0, "NEED": 1, "EAGER": 0},
        "the same with two commands each",
        is_for_mutants=True,
    ),
    "turns": Bounds({"W": 2, "R": 1, "T": 2, "EAGER": 0}, "two workers, two rounds, nobody dies"),
    "group": Bounds({"W": 1, "R": 2, "T": 2, "KILLS": 1, "EAGER": 0}, "results counted in groups, the worker dies"),
    "close": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "CLOSERS": 1, "EAGER": 0},
        "another thread closes the pool, the worker dies",
    ),
    "buffer": Bounds(
        {"W": 1, "R": 2, "T": 1, "KILLS": 1, "EAGER": 2, "SPURIOUS": 1, "TSO": 1},
        "done words stay in a store buffer; sleeping threads wake spuriously",
    ),
    "request": Bounds({"W": 1, "R": 2, "T": 2, "REQUESTS": 1, "EAGER": 0}, "slow requests between commands"),
    "request_death": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REQUESTS": 1, "EAGER": 0}, "slow requests, the worker dies"
    ),
    "hang": Bounds({"W": 1, "R": 1, "T": 2, "LIMITS": 1, "HANGS": 1, "EAGER": 0}, "a command hangs", True),
    "overdue": Bounds(
        {"W": 1, "R": 2, "T": 1, "LIMITS": 1, "EAGER": 0}, "a process exceeds a deadline, and is killed at any point"
    ),
    "lanes": Bounds(
        {"W": 1, "R": 2, "T": 1, "LIMITS": 1, "LANES": 1, "EAGER": 0},
        "the same, and another thread of the process may exceed one at any point",
    ),
    "overlap": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "OVERLAP": 1, "HANGS": 1, "EAGER": 0},
        "an early reset hangs",
    ),
    "replace": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "HANGS": 1, "REVIVES": 1, "LIVES": 1, "EAGER": 0},
        "a process that hangs is killed and restarted",
    ),
    "revive": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 1, "EAGER": 0},
        "a dead worker is restarted, or not, and dies again",
    ),
    "stop": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "STOPS": 1, "SLICES": 2, "EAGER": 0},
        "a process is stopped at any point: it starts no command, or never finishes publishing",
    ),
    "scribble": Bounds(
        {
            "W": 1,
            "R": 2,
            "T": 1,
            "KILLS": 1,
            "SCRIBBLES": 1,
            "REVIVES": 1,
            "LIVES": 1,
            "NEED": 1,
            "EAGER": 0,
        },
        "a worker overwrites the words of one of its rows as it dies, and is restarted or not",
    ),
    "scribble_twice": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "SCRIBBLES": 1, "REVIVES": 1, "LIVES": 1, "EAGER": 0},
        "the same with one row, and the commands after that",
    ),
    "spare": Bounds(
        {"W": 1, "R": 2, "T": 3, "SPARES": 1, "RESETS": 1, "LIVES": 1, "EAGER": 0},
        "an env and a spare take turns; a reset of all comes while the spare is still being reset",
    ),
    "spare_death": Bounds(
        {"W": 1, "R": 2, "T": 2, "SPARES": 1, "OVERS": 1, "KILLS": 1, "REVIVES": 1, "LIVES": 1, "EAGER": 0},
        "an env and a spare; their worker dies and is restarted",
    ),
    "restart": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "EAGER": 0}, "the smallest with a restart", True
    ),
    "retry": Bounds(
        {
            "W": 1,
            "R": 1,
            "T": 2,
            "KILLS": 1,
            "REVIVES": 1,
            "RETRIES": 1,
            "AWAITS": 1,
            "INTERRUPTS": 1,
            "LIVES": 1,
            "EAGER": 0,
        },
        "a restart that fails is begun again; the learner waits for it alone, or for results; Ctrl-C",
    ),
    "replay": Bounds({"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, **REPLAY}, "the smallest with a replay", True),
    "replay_interrupt": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "AWAITS": 1, "INTERRUPTS": 1, **REPLAY},
        "the learner waits for the end of a replay alone, or for results; Ctrl-C; the restart may fail",
    ),
    "replay_group": Bounds(
        {"W": 1, "R": 2, "T": 1, "KILLS": 1, "REVIVES": 1, **REPLAY},
        "two envs of a worker that dies, one with an episode, one without",
    ),
    "replay_differs": Bounds(
        {"W": 1, "R": 1, "T": 3, "KILLS": 1, "REVIVES": 1, "DEVIATIONS": 1, **REPLAY},
        "an episode does not go as it went before, and is cut short",
    ),
    "replay_death": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 2, "CALM": 1, **REPLAY},
        "a worker dies between commands, and its successor at any point",
    ),
    "replay_new": Bounds(
        {"W": 1, "R": 1, "T": 1, "KILLS": 2, "REVIVES": 1, **REPLAY},
        "a worker dies before the first reset, and its successor as it is about to serve",
        is_for_mutants=True,
    ),
    "replay_last": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 1, "CALM": 1, "AWAITS": 1, **REPLAY},
        "a successor dies in a replay, and no restart is left; a call of the user finds its death",
        is_for_mutants=True,
    ),
    "replay_left": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 2, "CALM": 1, "INTERRUPTS": 1, "AWAITS": 1, **REPLAY},
        "a successor dies in a replay, beside a Ctrl-C; a call of the user finds its death",
        is_for_mutants=True,
    ),
    "replay_call": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "CALM": 1, "CALLS": 1, **REPLAY},
        "a call is repeated in a replay, and a thread awaits its outcome",
    ),
    "replay_call_death": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 1, "CALM": 1, "CALLS": 1, **REPLAY},
        "the same, and the successor dies; no other restart",
        is_for_mutants=True,
    ),
    "truncate": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "RETRIES": 1, "TRUNCATES": 1, **REPLAY},
        "episodes are cut short in place of that; a restart that fails is begun again",
    ),
    "truncate_late": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "RETRIES": 1, "LATE_FAILS": 1, "TRUNCATES": 1, **REPLAY},
        "a restart fails though its worker serves already",
    ),
    "truncate_overdue": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "REVIVES": 1, "TRUNCATES": 1, **REPLAY},
        "a worker is given up, and replaced",
    ),
    "spin": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "SPINNERS": 1, "ENDS": 1, "EAGER": 0},
        "one may spin; the dead leave no permit behind",
        True,
    ),
    "spinners": Bounds({"W": 2, "R": 1, "T": 1, "SPINNERS": 1, "ENDS": 1, "EAGER": 0}, "three want to spin, one may"),
    "watch": Bounds(
        {"W": 2, "R": 1, "T": 2, "WATCHES": 1, "NEED": 1, "EAGER": 1},
        "an event loop waits, and gives commands meanwhile",
    ),
    "watch_death": Bounds(
        {"W": 1, "R": 2, "T": 1, "KILLS": 1, "WATCHES": 1, "NEED": 1, "EAGER": 1}, "the same; the worker dies"
    ),
    "watch_restart": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "WATCHES": 1, "NEED": 1, "EAGER": 1},
        "the same; it is restarted or not",
    ),
    "coroutines": Bounds(
        {"W": 1, "R": 2, "T": 2, "COROUTINES": 1, "NEED": 1, "EAGER": 0}, "a worker runs several commands at a time"
    ),
    "coroutines_death": Bounds(
        {"W": 1, "R": 2, "T": 1, "KILLS": 1, "COROUTINES": 1, "NEED": 1, "EAGER": 0}, "the same; it dies at any point"
    ),
    "single": Bounds({"W": 1, "R": 2, "T": 1, "KILLS": 1, "EAGER": 0}, "the smallest with a group and a death", True),
}

# name: (bounds in which it must fail, what it removes)
MUTANTS = {
    # the worker sleeps and is woken
    "LATE_SEEN": ("turns", "the worker reads its bell after the tickets"),
    "NO_COMPARE": ("group", "the kernel does not compare before it lets sleep"),
    "LATE_PARKED": ("group", "`parked` is stored after the comparison"),
    "LATE_BUMP": ("group", "the ringer reads `parked` before it moves the bell"),
    "NO_BUMP": ("group", "the bell does not move"),
    "NO_WAKE": ("group", "no futex_wake_all"),
    "EARLY_RING": ("group", "the worker is rung before its tickets are written"),
    "NO_RING": ("group", "the worker is not rung"),
    # the learner sleeps and is woken
    "NO_FLUSH": ("group", "published results are not counted"),
    "EARLY_COUNT": ("group", "a result is counted before it is done"),
    "EARLY_RING_AT": ("turns", "`ring_at` is read before the count is added"),
    "EQUAL_RING_AT": ("group", "== in place of crossing"),
    "LATE_BELL": ("turns", "the learner reads its bell after the rows"),
    "LATE_COUNT": ("turns", "the learner reads the count after the rows"),
    "NO_RECOUNT": ("turns", "the count is not read again after `ring_at` is set"),
    "LATE_RING_AT": ("turns", "`ring_at` is set after the count was read again"),
    "KEEP_RING_AT": ("pair", "`ring_at` is not computed again for each wait"),
    "TRUST_COUNT": ("pair", "the rows are not scanned again after a wake-up unless the count has grown"),
    # an event loop waits in place of that
    "NO_EVENT": ("watch", "a ring does not make the eventfd readable"),
    "LATE_EVENT_BUMP": ("watch", "the ringer reads `parked` before it moves the bell"),
    "NO_WATCH_LOOK": ("watch", "the bell is not read again after `parked` is set"),
    "LATE_CLEAR": ("watch", "the eventfd is cleared after the bell is read again"),
    # an event loop runs the commands of a worker
    "NO_WATCHER_EVENT": ("coroutines", "the native thread does not make the eventfd readable"),
    "LATE_SWEPT": ("coroutines", "the bell's value is stored after the tickets were read"),
    "LATE_CLEAR_EVENT": ("coroutines", "the eventfd is cleared after the bell's value was stored"),
    # states
    "NO_TAKE_CHECK": ("overdue", "a worker starts a command that was aborted"),
    "NO_TAKE_COMPARE": ("overdue", "a command is started by a store, not by CAS"),
    "NO_CLAIM": ("hang", "a result is published without CAS"),
    "DONE_BEFORE_DATA": ("single", "done is stored before the result"),
    # aborts
    "EARLY_DONE": ("single", "the reaper stores done before the fault"),
    "ROB_THE_LIVING": ("overdue", "a command is aborted while its worker, which may live, publishes its result"),
    "NO_ROB": ("single", "the command of a worker that died while publishing is not aborted"),
    "ROB_LATER": ("deadline_turns", "a command is aborted under the ticket of an earlier one"),
    "NO_TAKE_CAS": ("overdue", "commands are aborted by a store, not by CAS"),
    "ABORT_THE_DONE": ("single", "`done` is not read before a command is aborted"),
    "NO_REAPER_RING": ("single", "the reaper does not ring"),
    "LATE_DEAD": ("single", "tickets are read before `dead` is written"),
    "EARLY_CHECK_DEATHS": ("single", "`dead` is read before the tickets are written"),
    "NO_CHECK_DEATHS": ("single", "`dead` is not read after the tickets are written"),
    # deadlines
    "NO_GIVE_UP_COMPARE": ("hang", "an overdue command is aborted by a store, not by CAS"),
    "BLAME_TICKET": ("hang", "the hanging command is determined from the ticket, not from the state"),
    "LATE_OVERDUE": ("hang", "a command is aborted before its worker is marked OVERDUE"),
    "NO_SECOND_PROGRESS": ("hang", "progress is not read again"),
    "LATE_PROGRESS": ("hang", "`current` is stored before progress when a command begins"),
    "EARLY_PROGRESS": ("hang", "progress is stored before `current` when a command ends"),
    "NO_GIVEN_UP": ("deadline", "a thread does not check whether it was given up"),
    "NO_OVERDUE_RING": ("deadline", "a thread that was given up is not rung"),
    # workers that are stopped
    "NO_UNTAKEN": ("stop", "commands that no worker starts are not checked"),
    "NO_FIRST_LOOK": ("stop", "a command that no worker starts is late at the first check"),
    "TAKEN_ONLY": ("stop", "a command that was started, and then made no progress, is never late"),
    "NO_STUCK": ("stop", "a worker that never finishes publishing is not ended"),
    # words that a dead worker has overwritten
    "NO_ABORT_DEAD": (
        "scribble_twice",
        "the learner does not abort commands whose words a dead worker has overwritten",
    ),
    "NO_REAPED_RING": ("scribble_twice", "the learner is not woken when the reaper has finished with a dead worker"),
    "EARLY_REAPED": ("scribble_twice", "the learner aborts what the reaper is about to abort"),
    "NO_TICKET_AGAIN": ("scribble_twice", "the ticket is not written again"),
    "NO_STATE_AGAIN": ("scribble_twice", "the state is not written again"),
    "NO_LOST_WITH": ("scribble", "commands that are outstanding when a worker is restarted are left to its successor"),
    # spares
    "EARLY_TEND": ("spare", "deferred resets are sent before the count is read"),
    "NO_BEHIND": ("spare", "a reset is sent while another one is running"),
    "LATE_ROW": ("spare", "the command words are written after the ticket"),
    "NO_STAGE_RING": ("spare", "a staged reset does not ring"),
    "NO_STAGED": ("spare", "the worker sleeps although staged resets are outstanding"),
    "FORGET_STAGED": ("spare", "the worker sleeps after one staged reset"),
    "NO_STAGED_FLUSH": ("spare", "staged resets are not counted"),
    "NO_STAGE_DEATHS": ("spare_death", "`dead` is not read after a staged reset was sent"),
    # requests
    "NO_REQUEST_RING": ("request", "a request does not ring"),
    "EARLY_REQUEST_RING": ("request", "the bell is rung before the request is announced"),
    "EARLY_REQUESTS": ("request", "the sweep reads requests before the ticket"),
    "NO_REQUEST_CHECK": ("request", "the sweep does not check for requests"),
    "NO_RUN_UNTIL": ("request", "a request does not wait for the commands before it"),
    # close
    "NO_CLOSE_RING": ("close", "close() does not ring the learner"),
    "EARLY_CLOSE_RING": ("close", "close() rings the learner before is_closed is set"),
    "NO_STOP_RING": ("close", "close() does not ring the workers"),
    "EARLY_STOP_RING": ("close", "close() rings the workers before `stop` is set"),
    "EARLY_STOP": ("close", "the worker reads `stop` before its bell"),
    # restart
    "NO_DECLARE": ("restart", "a worker is restarted before its predecessor is marked dead"),
    "NO_GENERATION": ("replace", "the end of the old process is mistaken for that of the new one"),
    "NO_LAST_CHECK": (
        "restart",
        "commands that were sent during a restart are not aborted when the last restart has failed",
    ),
    "NO_HAS_EVENT": ("restart", "a wait does not check whether a restart is done"),
    "EARLY_EVENT": ("restart", "a wait checks for events before it reads its bell"),
    "NO_NOTIFY_RING": ("restart", "a notification does not ring"),
    "EARLY_NOTIFY_RING": ("restart", "the ring comes before the notification"),
    "EARLY_NOTIFY": ("restart", "the notification comes before the outcome"),
    "LATE_TAKE": ("retry", "the notification is cleared after the outcomes were read"),
    "NO_LOCK": ("restart", "the reaper and the restart of a worker do not exclude each other"),
    "NO_HOLD": ("replace", "a worker that is being restarted sees the commands for its successor"),
    "NO_UNHIDE": ("replace", "tickets stay unpublished after a restart has failed"),
    "KEEP_DEAD": ("restart", "`dead` stays set when a worker is restarted"),
    # replays
    "NO_NEVER_DONE": ("replay", "the result of a replayed command is received as a result of the env"),
    "GIVE_SUSPENDED": ("replay", "a step that is sent to a suspended env is published at once"),
    "DROP_SENT": ("replay", "a step that was sent during the replay is not published after it"),
    "NO_RESET_AGAIN": ("replay", "a lost reset is replayed like a step"),
    "LATE_CALLS": ("replay", "tickets are published before the calls that must precede them"),
    "NO_END_RING": ("replay", "a worker is not rung when its tickets are published"),
    "NO_FINISH_CHECK": ("replay_new", "`dead` is not read after the tickets were published"),
    "NO_GIVE_RING": ("replay", "a replay's command does not ring"),
    "NO_GIVE_CHECK": ("replay_death", "`dead` is not read after a replay's command was written"),
    "NO_STALE_FAULT": (
        "replay_last",
        "a replay that is given up leaves its newest result in the place of the env's result",
    ),
    "NO_CANCEL_RELEASE": ("replay", "envs stay suspended after the last restart has failed"),
    "FORGET_LOST": ("replay_death", "a death during a replay is not handled"),
    "FORGET_CALLS": ("replay_call_death", "a death during a repeated call is not handled"),
    "NO_NEWS": ("replay_interrupt", "the end of a replay does not end a wait for it alone"),
    "NO_CALL_NOTIFY": ("replay_call", "the outcome of a repeated call does not end a wait"),
    "KEEP_EVENTS": ("replay_left", "the events of a replay are kept when its worker dies"),
    "EARLY_RELEASE": ("truncate_late", "tickets are published when the dead worker's words are rewritten"),
    # spinning
    "NO_SPIN_CLEAR": ("spin", "the reaper does not return a dead worker's permit"),
    "TORN_PERMIT": ("spinners", "a permit is checked and acquired in two steps"),
    "NO_RELEASE": ("spin", "a permit is not returned"),
}

# What the code does although its correctness does not depend on it, and why.
EQUIVALENTS = {
    "NO_SECOND_LOOK": ("group", "park() reads the bell before the kernel does: saves a system call"),
    "NO_ABORTED_COUNT": ("single", "the reaper counts what it aborts: it rings anyway"),
    "NO_INTERRUPT_FLUSH": (
        "request",
        "a sweep counts results before it ends for a request: the learner need not wait for the request",
    ),
    "NO_LOOP_DONE": (
        "restart",
        "a new worker begins after the aborted commands: start_command() would refuse each of them",
    ),
    "NO_REPLAY_RING_AT": (
        "replay_group",
        "a wait is woken by each result while replays run: a replay does not stop while other envs of the wait are slow",
    ),
    "NO_PARKED_CLEAR": ("single", "the reaper clears a dead worker's `parked`: saves system calls"),
}
