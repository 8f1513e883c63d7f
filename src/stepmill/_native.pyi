"""The native core of stepmill."""

from collections.abc import Callable, Sequence
from typing import Any


LAYOUT_VERSION: int = 2

POOL_WORDS_BYTES: int = 128

SHARED_WORDS_BYTES: int = 192

def learner_words_bytes(num_servers: int) -> int:
    """Bytes of the learner's words of one worker."""

def worker_words_bytes(num_servers: int) -> int:
    """Bytes of one worker's own words."""

REPLAY_PLACE: int = 0

REPLAY_PLAYED: int = 1

REPLAY_DIFFERS: int = 2

REPLAY_FAULT: int = 3

class DeadWorkers(Exception):
    """
    Not for users: nothing was sent, since the workers in args[0] are dead.
    """

def register_errors(usage: object, busy: object, closed: object, bug: object) -> None:
    """Hand in the error classes that native code raises."""

class Slab:
    """One mapped slab of shared memory; slab/layout.py says what lies where."""

    def __init__(self, fd: int, plan: dict, command_fds: Sequence[int], result_fds: Sequence[int], writable: Sequence[tuple[int, int]], only_worker: int = -1) -> None:
        """
        Map a slab; each worker's two descriptors are duplicated, and -1 stands for those of another worker. writable: ranges of whole pages, (start, stop) each, that this process may write. only_worker: whose rows alone it uses.
        """

    @staticmethod
    def owning(fd: int, plan: dict, commands: Sequence[OwnedFd], results: Sequence[OwnedFd], writable: Sequence[tuple[int, int]]) -> Slab:
        """Map a slab, which takes over each worker's two descriptors."""

    def fds_of(self, worker: int) -> tuple[int, int]:
        """
        A worker's descriptors: of its commands, of its results. They stay the slab's.
        """

    def place(self) -> tuple:
        """
        Address and size in bytes of the mapping in this process, for whoever locks its pages.
        """

    def format(self) -> None:
        """Write the header. The pool's, once, before a worker attaches."""

    def set_spinning(self, max_spinners: int, num_spin_workers: int, spin_ns: int) -> None:
        """
        Say how many threads of this pool may spin at a time, and a worker's longest spin.
        """

    def worker_stats(self, worker: int) -> dict:
        """Seconds in envs and waiting, steps and resets of one worker."""

    def is_dead(self, worker: int) -> bool: ...

class Lease:
    """
    Base object of leased arrays: while it lives, their slot is not written.
    """

LOOP_REQUEST: int = 0

LOOP_STOP: int = 1

class Loop:
    """The hot loop of one worker."""

    def __init__(self, slab: Slab, worker: int, envs: list, settings: dict) -> None: ...

    def run(self) -> int:
        """
        Serve commands until a slow request or the end comes; waits without the GIL.
        """

    def run_server(self, server: int) -> bool:
        """
        Do the outstanding command of a server (its number in this worker); False if there is none.
        """

    def run_until(self, server: int, after_ticket: int) -> None:
        """
        Do a server's outstanding command if its ticket is at most after_ticket.
        """

    def wait_idle(self, timeout_s: float) -> bool:
        """
        In line, once the pool says stop: wait until no other thread runs a command; False if one still does.
        """

    def refresh(self) -> None:
        """Look up step and reset of every env again."""

    def begin_again(self, server: int) -> None:
        """
        Say that an env is about to be changed by a call: a reset ahead of its time, if it is to be repeatable, comes after that.
        """

    def keep_options(self, server: int, options: bytes | None) -> None:
        """
        Say what resets without options of their own are given, encoded; None forgets it.
        """

    def requests_seen(self, count: int) -> None:
        """Say how many slow requests were handled so far."""

    def release(self) -> None:
        """Drop every reference to Python objects."""

class Ledger:
    """The pool's books, and its hot path."""

    def __init__(self, slab: Slab, settings: dict) -> None: ...

    def attach_inline(self, loop: object) -> None:
        """Run commands in the caller, by this loop (the serial backend)."""

    def attach_helper(self, helper: object) -> None:
        """
        Have a pool that is not ours driven by the caller: helper(is_waiting) -> bool begins what was commanded and, to wait, brings results.
        """

    def step(self, actions: object) -> tuple[Any, ...] | None:
        """Step all envs; Gymnasium's five values, or None when a fault is there."""

    def step_obs(self, actions: object) -> Any | None:
        """The same, but observations only."""

    def hand_out(self, program: tuple[object, ...], wrap: Callable[[Any], object] | None, given: dict[int, Any]) -> None:
        """
        Say in which form batches of observations are handed out: factories, what becomes of each array, leaves that are the pool's to say.
        """

    def send(self, actions: object | None, env_ids: object | None = None) -> None:
        """Command a step of some or all envs."""

    def send_all(self, actions: object | None) -> None:
        """
        Command a step of all envs but those that are exhausted, whose rows will be empty.
        """

    def send_reset(self, env_ids: object | None, seeds: object, blobs: object) -> None:
        """Command resets; a seed and a blob, or None, per env."""

    def wait(self, min_envs: int, timeout_s: object | None = None) -> int:
        """
        0: that many are ready, 1: a fault is there, 2: timed out, 3: take_events() has something.
        """

    def wait_for(self, env_ids: object | None, timeout_s: object | None = None) -> int:
        """The same for all of these envs that are busy."""

    def wait_event(self, timeout_s: object | None = None) -> int:
        """The same for no env: until take_events() has something."""

    def collect(self, max_envs: int, out: object | None = None, env_ids: object | None = None) -> tuple[Any, ...] | None:
        """
        Receive ready envs, longest-waiting first: a Batch's fields. None: one cannot be read, and has a fault.
        """

    def collect_rows(self, env_ids: object) -> tuple[Any, dict[str, Any]] | None:
        """
        Receive these envs: newest observations of all envs, infos at their rows. None: one cannot be read, and has a fault.
        """

    def collect_ready(self) -> tuple[Any, ...] | None:
        """Gymnasium's five values if all envs are ready, else None."""

    @property
    def unclaimed(self) -> list[bool]:
        """
        One flag: set by every call that receives results, cleared by the pool once it has them.
        """

    def take_back(self) -> None:
        """
        The results of the last such call did not reach the user: they can be received again.
        """

    def observe(self, env_ids: object | None = None) -> object:
        """Newest observations of envs, a fresh copy."""

    def take_faults(self) -> list[tuple[int, int, bytes | dict[str, str] | None, int, int, bool, bool]]:
        """
        (env_id, kind, record or None, worker, ticket, begins_episode, was_resetting) of every pending env with a fault.
        """

    def fail(self, env_ids: object) -> None:
        """Pending envs with a fault become FAULTED."""

    def discard(self, env_ids: object | None) -> None:
        """Drop the results of these envs that are done."""

    def truncate(self, env_id: int, fault_info: object) -> None:
        """
        End the episode of an env that has a fault, marked; a reset is tried again.
        """

    def lose_envs(self, env_ids: object, fault_info: object) -> None:
        """The next step of these envs, as far as they are idle, is cut short."""

    def renew(self, env_ids: object) -> None:
        """FAULTED envs can be reset and stepped again."""

    def log_place(self, server: int) -> tuple:
        """
        Where an env object stands: (episodes begun, results of this one, of the one before, commanded, waits for a reset, is reset ahead).
        """

    def begin_replacement(self, worker: int, is_replayed: bool) -> None:
        """
        A worker is about to be replaced. Commands for its envs wait for its successor; with is_replayed its envs are held.
        """

    def clear_dead_worker(self, worker: int) -> None:
        """
        Settle what a worker was commanded that certainly runs no more. Before its successor starts; from any thread.
        """

    def finish_replacement(self, worker: int, pidfd: int) -> None:
        """
        The successor serves the slab: watch it, and publish the commands that waited for it.
        """

    def cancel_replacement(self, worker: int) -> None:
        """There is no successor: commands of the worker's envs become faults."""

    def fail_worker(self, worker: int) -> None:
        """
        A worker stays dead: its pending commands become faults, its idle envs FAULTED.
        """

    def attach_reaper(self, reaper: object) -> None:
        """Take the reaper that watches the workers."""

    def declare_dead(self, worker: int) -> None:
        """The worker's process is gone, which the reaper need not have noticed."""

    def notify(self) -> None:
        """
        End the wait of the pool's thread, or its next one, with 3. From any thread.
        """

    def take_events(self) -> list[tuple[int, int, int]]:
        """(env_id, REPLAY_..., step) of every replay that waits for Python."""

    def hold(self, env_id: int) -> None:
        """
        Treat a pending env that has a fault as busy until its replay has ended.
        """

    def is_held(self, env_id: int) -> bool:
        """Whether the env is held for a replay."""

    def held_envs(self) -> list[int]:
        """The envs that are held for a replay."""

    def begin_replay(self, env_id: int, places: object) -> bool:
        """
        Play the episode of a held env again. A REPLAY_PLACE event follows each command whose number is in places. False: its pending command is a reset, which was given again; nothing else is to be done.
        """

    def continue_replay(self, env_id: int) -> None:
        """Go on after a REPLAY_PLACE event."""

    def finish_replay(self, env_id: int) -> None:
        """After REPLAY_PLAYED: release the env, and give its pending command."""

    def fail_replay(self, env_id: int) -> None:
        """
        Release an env that cannot be replayed; truncate() or lose_envs() must follow.
        """

    def is_pending(self, env_id: int) -> bool:
        """Whether the env was commanded and not received."""

    def is_dead(self, worker: int) -> bool:
        """Whether the reaper found the worker dead."""

    def died_in_request(self, worker: int) -> bool:
        """Whether a dead worker was at a slow request, and at no command."""

    def can_replay(self, env_id: int) -> bool:
        """Whether the episode's log is whole."""

    def limit_logs(self, size_bytes: int) -> None:
        """From now on the episodes' logs take at most so much memory together."""

    def log_bytes(self) -> int:
        """Memory of the episodes' logs."""

    def episode_log(self, env_id: int) -> dict[str, Any]:
        """
        What a crash capsule tells of an env's episode and of the command under way.
        """

    def newest_outcome(self, env_id: int) -> tuple[float, int, int]:
        """
        Reward, flags (1 terminated, 2 truncated) and observation hash of an env's last result.
        """

    def running_env(self, worker: int) -> int:
        """Whose command a worker was at when it was last heard of; -1: none's."""

    def ready_ids(self) -> list[int]:
        """Envs whose result can be received."""

    def states(self) -> list[int]:
        """Per env: 0 idle, 1 busy, 2 ready, 3 faulted, 4 exhausted."""

    def num_ended(self) -> list[int]:
        """Per env: episodes that ended, of the budget."""

    def num_pending(self) -> int:
        """Envs commanded and not yet received."""

    def num_held(self) -> int:
        """Result slots that leases hold."""

    def ticket_of(self, env_id: int) -> int:
        """Number of the command last given to the env."""

    def ticket_of_server(self, server: int) -> int:
        """Number of the command last given to a server."""

    def server_of(self, env_id: int) -> int:
        """
        The server that serves the env now; from num_envs on, those in the queue.
        """

    def worker_of(self, env_id: int) -> int:
        """The worker whose server serves the env now."""

    def envs_of(self, worker: int) -> list[int]:
        """The envs that a worker's servers serve now."""

    def restore_order(self) -> None:
        """Every env is served by its own server again; spares queue up."""

    def claim_staged(self, env_ids: object | None) -> None:
        """
        Envs whose next episode is begun: its first observation is to be received.
        """

    def stage_spares(self, seeds: object) -> None:
        """Reset all spares, which wait in the queue; a seed or None for each."""

    def spare_counts(self) -> tuple[int, int]:
        """
        Episodes that began with a fresh env, and how many of those still had to wait for it.
        """

    def post_request(self, worker: int) -> None:
        """Tell a worker that a slow request waits in its mailbox."""

    def set_eager(self, is_eager: bool) -> None:
        """Whether workers report each result at once, or a group at a time."""

    def close(self) -> None:
        """
        Tell the workers to end, wake a waiter, refuse further use. From any thread.
        """

    def release(self) -> None:
        """Drop every reference to Python objects."""

def encode(obj: object, pickler: Callable[[object], bytes] | None) -> bytes:
    """
    Return `obj` as bytes, each part with its exact type; `pickler(part) -> bytes` takes what the codec does not know.
    """

def decode(data: bytes, unpickler: Callable[[bytes], object] | None) -> object:
    """
    Return the object that `data` encodes. Raises ValueError, and does no harm, if `data` is no such bytes.
    """

def decode_all(data: bytes, unpickler: Callable[[bytes], object] | None, objects: list[object] | None) -> tuple[object, ...]:
    """
    The same for values that follow each other; `objects` are those that were passed by reference.
    """

class OwnedFd:
    """
    A descriptor and its one owner: closed once, by close(), from any thread, or when the owner is gone.
    """

    def __init__(self, fd: int = -1) -> None:
        """Take over a descriptor; -1 is none."""

    @staticmethod
    def duplicate(fd: int) -> OwnedFd:
        """
        Return the owner of a duplicate. This and all others are close-on-exec.
        """

    @staticmethod
    def memfd(name: str, *, can_be_sealed: bool = False) -> OwnedFd:
        """Return the owner of memory without a name in the file system."""

    @staticmethod
    def eventfd() -> OwnedFd:
        """Return the owner of an event counter of 0."""

    @staticmethod
    def pidfd(pid: int) -> OwnedFd:
        """
        Return the owner of a descriptor that polls readable once the process has ended. Raises ProcessLookupError if there is none.
        """

    def fileno(self) -> int:
        """Return the descriptor; -1 if it owns none, or none any more."""

    def release(self) -> int:
        """
        Give the descriptor away: the caller owns it. Returns -1 if there is none.
        """

    def close(self) -> None:
        """Close the descriptor, if it is still open."""

EXIT_LEARNER_GONE: int = 66

def watch_parent(pidfd: int) -> None:
    """
    End this process, by a native thread, as soon as the process behind `pidfd` has ended. Keeps a duplicate.
    """

def pidfd_open(pid: int) -> int:
    """
    Return a descriptor as OwnedFd.pidfd does, which the caller has to close.
    """

def pidfd_send_signal(pidfd: int, signal: int) -> None:
    """
    Send a signal to the process behind `pidfd`. Raises ProcessLookupError once it has ended.
    """

def is_from_signal(error: BaseException) -> bool:
    """
    Return whether an exception is a KeyboardInterrupt, or was raised by a signal handler.
    """

def begin_exit() -> None:
    """
    Say that this thread runs the program's exit functions. Other threads that use a closed pool end by SystemExit from now on.
    """

def is_exiting() -> bool:
    """Return whether the program's exit functions run."""

def append_result(results: list, function: Callable) -> None:
    """
    Append what a function without arguments returns to a list. No signal handler can raise between the two.
    """

def yields_fairly() -> bool:
    """
    Return whether a thread that yields its core goes behind all that want it.
    """

def usable_cores() -> int:
    """
    Return the number of cores this process may use: affinity mask and cgroup quota, at least 1.
    """

class Reaper:
    """
    Watches workers and deadlines in a native thread; makes faults of deaths and hangs.
    """

    def __init__(self, slab: Slab, step_timeout_s: float | None = None, reset_timeout_s: float | None = None, dump_signal: int = 0, call_timeout_s: float | None = None, attempts_timeout_s: float | None = None) -> None:
        """
        step_timeout_s, reset_timeout_s, call_timeout_s: of one step, reset, call. attempts_timeout_s: of a reset with all its attempts.
        """

    def watch(self, worker: int, pidfd: int = -1) -> None:
        """
        Watch a worker that lives from now on: the process behind `pidfd` (duplicated), or a thread if it is -1.
        """

    def forget(self, worker: int) -> None:
        """Watch a worker no longer: its end is expected."""

    def declare_dead(self, worker: int) -> None:
        """Treat a worker thread that has ended like a process that died."""

    def stop(self) -> None:
        """End the thread; idempotent. Deaths go unnoticed from then on."""

FOREIGN_COMMANDS: int = 2

class ForeignLoop:
    """A proxy's side of the slab, for a pool of envs that is not ours."""

    def __init__(self, slab: Slab, worker: int, settings: dict) -> None: ...

    def take(self, may_wait: bool) -> tuple[int, Any, Any, list[tuple[int, Any, Any]] | None]:
        """
        Take what was commanded: (exit, servers, actions, resets); waits for it without the GIL.
        """

    def take_one(self, server: int, after_ticket: int) -> tuple[int, Any, Any, list[tuple[int, Any, Any]] | None]:
        """The same for one server, if its ticket is at most after_ticket."""

    def publish(self, servers: object, obs: object, reward: object | None, terminated: object | None, truncated: object | None, infos: object | None) -> list[int]:
        """
        Write results, row j of servers[j]; returns the servers that are to be reset first (SAME_STEP).
        """

    def fail(self, servers: object, error: object, phase: str) -> None:
        """Make an exception the fault of these servers, as far as they fly."""

    def flying(self) -> list[int]:
        """Servers whose command was taken and has no result yet."""

    def num_flying(self) -> int:
        """How many there are of them."""

    def requests_seen(self, count: int) -> None:
        """Say how many slow requests were handled so far."""

    def release(self) -> None:
        """Drop every reference to Python objects."""
