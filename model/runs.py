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
        "done words linger in a store buffer; sleepers wake for no reason",
    ),
    "request": Bounds({"W": 1, "R": 2, "T": 2, "REQUESTS": 1, "EAGER": 0}, "slow requests between commands"),
    "request_death": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REQUESTS": 1, "EAGER": 0}, "slow requests, the worker dies"
    ),
    "hang": Bounds({"W": 1, "R": 1, "T": 2, "LIMITS": 1, "HANGS": 1, "EAGER": 0}, "a command hangs", True),
    "overdue": Bounds(
        {"W": 1, "R": 2, "T": 1, "LIMITS": 1, "EAGER": 0}, "a process is given up, and killed in the middle of anything"
    ),
    "overlap": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "OVERLAP": 1, "HANGS": 1, "EAGER": 0},
        "a reset that nobody asked for hangs",
    ),
    "replace": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "HANGS": 1, "REVIVES": 1, "LIVES": 1, "EAGER": 0},
        "a process that hangs is killed and replaced",
    ),
    "revive": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 1, "EAGER": 0},
        "a dead worker is replaced, or is not, and dies again",
    ),
    "stop": Bounds(
        {"W": 1, "R": 1, "T": 2, "LIMITS": 1, "STOPS": 1, "SLICES": 2, "EAGER": 0},
        "a process is stopped at any point: it takes nothing, or never comes to an end of publishing",
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
        "a worker writes nonsense over the words of one of its rows as it dies, and is replaced or is not",
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
        "an env and a spare, their worker dies and is replaced",
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
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 1, "CALM": 1, **REPLAY},
        "a successor dies in a replay, and no restart is left",
        is_for_mutants=True,
    ),
    "replay_left": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 2, "CALM": 1, "INTERRUPTS": 1, **REPLAY},
        "a successor dies in a replay, beside a Ctrl-C",
        is_for_mutants=True,
    ),
    "replay_call": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 2, "REVIVES": 1, "CALM": 1, "CALLS": 1, **REPLAY},
        "the same with a call that is repeated, whose outcome a thread awaits; no other restart",
    ),
    "truncate": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "RETRIES": 1, "TRUNCATES": 1, **REPLAY},
        "episodes are cut short in place of that; a restart that fails is begun again",
    ),
    "truncate_late": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "REVIVES": 1, "RETRIES": 1, "LATE_FAILS": 1, "TRUNCATES": 1, **REPLAY},
        "a restart fails though its worker serves already",
    ),
    "spin": Bounds(
        {"W": 1, "R": 1, "T": 2, "KILLS": 1, "SPINNERS": 1, "ENDS": 1, "EAGER": 0},
        "one may spin; the dead leave no permit behind",
        True,
    ),
    "spinners": Bounds({"W": 2, "R": 1, "T": 1, "SPINNERS": 1, "ENDS": 1, "EAGER": 0}, "three want to spin, one may"),
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
    "EARLY_WANT": ("turns", "`want` is read before the count is added"),
    "EQUAL_WANT": ("group", "== in place of crossing"),
    "LATE_BELL": ("turns", "the learner reads its bell after the rows"),
    "LATE_COUNT": ("turns", "the learner reads the count after the rows"),
    "NO_RECOUNT": ("turns", "the count is not read again after `want` is armed"),
    "LATE_WANT": ("turns", "`want` is armed after the count was read again"),
    "KEEP_WANT": ("pair", "`want` is not computed again for each wait"),
    "TRUST_COUNT": ("pair", "a wake does not scan the rows again, the count is believed"),
    # states
    "NO_TAKE_CHECK": ("overdue", "a condemned command is taken"),
    "NO_TAKE_COMPARE": ("overdue", "a command is taken by a store, not by CAS"),
    "NO_CLAIM": ("hang", "a result is published without CAS"),
    "DONE_BEFORE_DATA": ("single", "done is stored before the result"),
    # condemnation
    "EARLY_DONE": ("single", "the reaper stores done before the fault"),
    "ROB_THE_LIVING": ("overdue", "who publishes and may live is condemned"),
    "NO_ROB": ("single", "who died publishing is not condemned"),
    "ROB_LATER": ("deadline_turns", "a command is condemned by the number of an earlier one"),
    "NO_TAKE_CAS": ("overdue", "commands are condemned by a store, not by CAS"),
    "SETTLE_THE_DONE": ("single", "done is not looked at before a command is condemned"),
    "NO_REAPER_RING": ("single", "the reaper does not ring"),
    "LATE_DEAD": ("single", "tickets are read before `dead` is written"),
    "EARLY_CHECK_DEATHS": ("single", "`dead` is read before the tickets are written"),
    "NO_CHECK_DEATHS": ("single", "`dead` is not read after the tickets are written"),
    # deadlines
    "NO_GIVE_UP_COMPARE": ("hang", "an overdue command is condemned by a store, not by CAS"),
    "BLAME_TICKET": ("hang", "the ticket, not the state, says what hangs"),
    "LATE_OVERDUE": ("hang", "a command is given up before its worker is said to be overdue"),
    "NO_SECOND_PROGRESS": ("hang", "progress is not read again"),
    "LATE_PROGRESS": ("hang", "`current` is stored before progress when a command begins"),
    "EARLY_PROGRESS": ("hang", "progress is stored before `current` when a command ends"),
    "NO_GIVEN_UP": ("deadline", "a thread that was given up does not look whether it was"),
    "NO_OVERDUE_RING": ("deadline", "a thread that was given up is not rung"),
    # workers that are stopped
    "NO_UNTAKEN": ("stop", "commands that nobody takes are not looked at"),
    "NO_FIRST_LOOK": ("stop", "a command that nobody takes is late at the first look"),
    "TAKEN_ONLY": ("stop", "a command that was taken, and no more, is not late"),
    "NO_STUCK": ("stop", "who never comes to an end of publishing is left alone"),
    # words that the dead have scribbled over
    "NO_SETTLE_DEAD": ("scribble_twice", "the learner does not look after what the dead have scribbled"),
    "NO_BURIED_RING": ("scribble_twice", "the learner is not woken when the reaper has finished with a dead worker"),
    "EARLY_BURIED": ("scribble_twice", "the learner settles what the reaper is about to settle"),
    "NO_TICKET_AGAIN": ("scribble_twice", "the ticket is not written once more"),
    "NO_STATE_AGAIN": ("scribble_twice", "the state is not written once more"),
    "NO_LOST_WITH": ("scribble", "all that is not done when a worker is replaced is taken for its successor's"),
    # spares
    "EARLY_TEND": ("spare", "resets that waited for others are commanded before the count is read"),
    "NO_BEHIND": ("spare", "a reset is commanded while another still runs"),
    "LATE_ROW": ("spare", "the command words are written after the ticket"),
    "NO_STAGE_RING": ("spare", "a reset ahead of its time does not ring"),
    "NO_STAGED": ("spare", "the worker goes to sleep on resets ahead of their time"),
    "FORGET_STAGED": ("spare", "the worker goes to sleep after one reset ahead of its time"),
    "NO_STAGED_FLUSH": ("spare", "resets ahead of their time are not counted"),
    "NO_STAGE_DEATHS": ("spare_death", "`dead` is not read after a reset ahead of its time was commanded"),
    # requests
    "NO_REQUEST_RING": ("request", "a request does not ring"),
    "EARLY_REQUEST_RING": ("request", "the bell is rung before the request is announced"),
    "EARLY_REQUESTS": ("request", "the sweep reads requests before the ticket"),
    "NO_REQUEST_CHECK": ("request", "the sweep does not look for requests"),
    "NO_RUN_UNTIL": ("request", "a request does not wait for the commands before it"),
    # close
    "NO_CLOSE_RING": ("close", "close() does not ring the learner"),
    "EARLY_CLOSE_RING": ("close", "close() rings the learner before is_closed is set"),
    "NO_STOP_RING": ("close", "close() does not ring the workers"),
    "EARLY_STOP_RING": ("close", "close() rings the workers before `stop` is set"),
    "EARLY_STOP": ("close", "the worker reads `stop` before its bell"),
    # restart
    "NO_DECLARE": ("restart", "a worker is replaced before the old one is marked dead"),
    "NO_GENERATION": ("replace", "the end of the old process is taken for the end of the new"),
    "NO_LAST_CHECK": ("restart", "after the last restart that failed, what was commanded meanwhile is not condemned"),
    "NO_HAS_EVENT": ("restart", "a wait does not look whether a restart is done"),
    "EARLY_EVENT": ("restart", "it looks before it reads its bell"),
    "NO_NOTIFY_RING": ("restart", "who has notified does not ring"),
    "EARLY_NOTIFY_RING": ("restart", "it rings before it notifies"),
    "EARLY_NOTIFY": ("restart", "it notifies before the outcome is there"),
    "LATE_TAKE": ("retry", "the notification is cleared after the outcomes were looked at"),
    "NO_LOCK": ("restart", "the reaper and who replaces a worker do not exclude each other"),
    "NO_HOLD": ("replace", "who is to be replaced sees what its successor is commanded"),
    "NO_UNHIDE": ("replace", "a restart that fails leaves tickets held back"),
    "KEEP_DEAD": ("restart", "`dead` stays set when a worker is replaced"),
    # replays
    "NO_NEVER_DONE": ("replay", "what a replay's command returns is taken for a result"),
    "GIVE_HELD": ("replay", "a step that is sent to an env that is held is commanded at once"),
    "DROP_SENT": ("replay", "a step that was sent meanwhile is not given when the replay is over"),
    "NO_RESET_AGAIN": ("replay", "a reset that was lost is replayed like a step"),
    "LATE_CALLS": ("replay", "tickets are let go before the calls that come first"),
    "NO_END_RING": ("replay", "a worker is not rung when its tickets are let go"),
    "NO_FINISH_CHECK": ("replay_new", "`dead` is not read after tickets were let go"),
    "NO_REPLAY_WANT": ("replay_group", "a wait while replays play wants as many results as one without"),
    "NO_GIVE_RING": ("replay", "a replay's command does not ring"),
    "NO_GIVE_CHECK": ("replay_death", "`dead` is not read after a replay's command was written"),
    "NO_STALE_FAULT": ("replay_last", "a replay that is given up leaves its newest result where the env's would be"),
    "NO_CANCEL_RELEASE": ("replay", "envs stay held after the last restart has failed"),
    "FORGET_LOST": ("replay_death", "nobody deals with a death in a replay"),
    "FORGET_CALLS": ("replay_call", "nobody deals with a death in a call that is repeated"),
    "NO_CALL_NOTIFY": ("replay_call", "the outcome of a repeated call does not end a wait"),
    "KEEP_EVENTS": ("replay_left", "what a replay has told outlives its worker"),
    "EARLY_RELEASE": ("truncate_late", "tickets are published when the dead worker's words are rewritten"),
    # spinning
    "NO_SPIN_CLEAR": ("spin", "the reaper leaves a dead worker's permit"),
    "TORN_PERMIT": ("spinners", "a permit is looked for and taken in two steps"),
    "NO_RELEASE": ("spin", "a permit is not given back"),
}

# What the code does although nothing depends on it; the reason why it does.
EQUIVALENTS = {
    "NO_SECOND_LOOK": ("group", "park() reads the bell before the kernel does: saves a system call"),
    "NO_SETTLED_COUNT": ("single", "the reaper counts what it settles: it rings anyway"),
    "NO_INTERRUPT_FLUSH": (
        "request",
        "a sweep counts before it lets a request pass: the learner need not wait for the request",
    ),
    "NO_LOOP_DONE": (
        "restart",
        "a new worker begins behind what is settled: take_command() would refuse that, one by one",
    ),
    "NO_PARKED_CLEAR": ("single", "the reaper clears a dead worker's `parked`: saves system calls"),
}
