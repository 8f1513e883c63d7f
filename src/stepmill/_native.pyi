"""The native core of stepmill."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


LAYOUT_VERSION: int = 2330705789

SHARED_WORDS_BYTES: int = 192

def learner_words_bytes(num_servers: int) -> int:
    """Return the size of the learner's words of one worker."""

def worker_words_bytes(num_servers: int) -> int:
    """Return the size of one worker's own words."""

def server_word_offsets(num_servers: int) -> dict[str, int]:
    """
    Return offsets of some words and of the counters of a worker's first server, by name, from the worker's words.
    """

def counter_formats() -> dict[str, dict[str, Any]]:
    """
    Return the structures that programs read, as numpy.dtype takes them, by name.
    """

def bucket_stops_ns() -> list[int]:
    """
    Return, for each bucket of the histograms of durations, the shortest time in ns that is above it.
    """

ENV_IDLE: int = 0

ENV_BUSY: int = 1

ENV_READY: int = 2

ENV_FAULTED: int = 3

ENV_EXHAUSTED: int = 4

ENV_NEEDS_RESET: int = 5

class DeadWorkers(Exception):
    """Internal: nothing was sent, since the workers in args[0] are dead."""

def register_errors(usage: object, busy: object, closed: object, bug: object) -> None:
    """Register the error classes that native code raises."""

class Slab:
    """One mapped slab of shared memory, laid out by slab/layout.py."""

    def __init__(self, fd: int, plan: dict, commands: Sequence[OwnedFd], results: Sequence[OwnedFd], event: OwnedFd, writable: Sequence[tuple[int, int]], only_worker: int = -1) -> None:
        """
        Map a slab, and take ownership of each worker's two descriptors, or of none for those of another worker, and of the pool's eventfd. writable: (start, stop) ranges of whole pages that this process may write. only_worker: the worker whose rows this process uses, if only one.
        """

    @property
    def event_fd(self) -> int:
        """The descriptor of the pool's eventfd. The slab keeps owning it."""

    def fds_of(self, worker: int) -> tuple[int, int]:
        """
        Return a worker's command and result descriptors. The slab keeps owning them.
        """

    def place(self) -> tuple:
        """
        Return address and size in bytes of the mapping in this process, for locking its pages.
        """

    def format(self) -> None:
        """Write the header. Called once, by the pool, before a worker attaches."""

    def set_spinning(self, max_spinners: int, num_spin_workers: int, spin_ns: int) -> None:
        """
        Set how many threads of this pool may spin at a time, which workers may, and a worker's longest spin.
        """

    def set_tracing(self, is_on: bool) -> None:
        """
        Set whether all threads of the pool write what they do to their rings of events.
        """

    def set_description(self, offset: int, size_bytes: int) -> None:
        """
        Write where the description for programs that attach is. Called once, by the pool, before a worker attaches.
        """

    def is_dead(self, lane: int) -> bool: ...

class Lease:
    """
    Base object of leased arrays: while it lives, nothing writes to their slot.
    """

LOOP_REQUEST: int = 0

LOOP_STOP: int = 1

class Loop:
    """The hot loop of one worker."""

    def __init__(self, slab: Slab, worker: int, envs: list, settings: dict) -> None: ...

    def run(self) -> int:
        """
        Run commands until a slow request or stop; return LOOP_REQUEST or LOOP_STOP. Releases the GIL while it waits.
        """

    def run_until(self, server: int, after_ticket: int) -> None:
        """
        Run a server's outstanding command if its ticket is at most after_ticket.
        """

    def wait_idle(self, timeout_s: float) -> bool:
        """
        Wait until no other thread runs a command (serial backend, after stop). Return False on timeout.
        """

    def refresh(self) -> None:
        """Look up the step and reset methods of all envs again."""

    def restart_early_reset(self, server: int) -> None:
        """
        Repeat an env's early reset after a call that may change the env, if episodes are logged.
        """

    def restore(self, server: int, position: dict) -> None:
        """
        Go on with an env whose object has the state of this position, which is one of PoolState.positions().
        """

    def set_default_options(self, server: int, options: bytes | None) -> None:
        """
        Set the encoded options of resets without options of their own; None removes them.
        """

    def requests_seen(self, count: int) -> None:
        """Set how many slow requests were handled so far."""

    def release(self) -> None:
        """Drop all references to Python objects."""

class CoroutineLoop(Loop):
    """The loop of envs whose methods are coroutines."""

    def __init__(self, slab: Slab, worker: int, envs: list, settings: dict) -> None: ...

    @property
    def event_fd(self) -> int:
        """
        A descriptor that is readable when receive_calls() is to be called. The loop keeps owning it.
        """

    def receive_calls(self) -> tuple[int, list[tuple[int, bool, Any]]]:
        """
        Return (exit, [(server, is_reset, arguments), ...]): calls to make. exit is LOOP_REQUEST, LOOP_STOP, or 2 if there are only calls.
        """

    def accept(self, server: int, returned: object) -> object:
        """
        Take what a call returned. Return the keyword arguments of the reset that follows it, or None: the result is published.
        """

    def fail(self, server: int, error: object) -> object:
        """
        Take what a call raised. Return the keyword arguments of a reset to be tried again, or None: the fault is published.
        """

    def hold(self, server: int, after_ticket: int | None) -> None:
        """Hold the commands of a server that are later than a ticket, or none."""

    def begin_request(self) -> None:
        """Record that one more slow request was read; commands may follow it."""

    def end_request(self) -> None:
        """Record that no slow request is being served."""

    def enter(self, server: int) -> None:
        """Record that the code of an env runs now."""

    def leave(self) -> None:
        """Record that no env's code runs, and that the worker lives."""

    def give_up(self, server: int) -> None:
        """
        Have this worker ended because of an env that is too late. Returns only in a thread.
        """

    def stop(self) -> None:
        """End the native thread. Idempotent."""

class PoolState:
    """The state of a pool and its hot path."""

    def __init__(self, slab: Slab, settings: dict) -> None: ...

    def attach(self, *, loop: Loop | None = None, kernel: KernelLoop | None = None, advance: Callable[[bool], bool] | None = None, outbox_fd: int | None = None, reaper: Reaper | None = None) -> None:
        """
        Connect parts. loop: the calling thread runs commands with it (serial backend). kernel: runs all envs. advance: runs an external pool in the calling thread; advance(is_waiting) starts new commands and, if is_waiting, fetches results. outbox_fd: an eventfd to add to after each delivery of commands, for the thread that sends them to other machines. reaper: watches the workers.
        """

    def step(self, actions: object) -> tuple[Any, ...] | None:
        """
        Step all envs. Return Gymnasium's five values, or None if there is a fault.
        """

    def step_obs(self, actions: object) -> Any | None:
        """Step all envs. Return the observations, or None if there is a fault."""

    def set_observation_format(self, program: tuple[object, ...], wrap: Callable[[Any], object] | None, given: dict[int, Any]) -> None:
        """
        Set the form of observations in batches: a program with other factories, a function that wraps each array, and leaves whose values are given.
        """

    def send(self, actions: object | None, env_ids: object | None = None, skips_exhausted: bool = False) -> None:
        """
        Send a step to some or all envs. skips_exhausted: not to exhausted ones, whose rows will be empty; only for all envs.
        """

    def send_reset(self, env_ids: object | None, seeds: object, blobs: object, spare_seeds: object | None = None) -> None:
        """
        Send resets, with a seed and a blob, or None, per env. spare_seeds: also reset all spares in the queue, with a seed or None for each.
        """

    def wait(self, timeout_s: object | None, *, num_envs: int | None = None, env_ids: object | None = None) -> int:
        """
        Wait until num_envs of the pending envs are ready, or those of env_ids that are busy; without either, until drain() returns something new. Return 0: ready, 1: there is a fault, 2: timed out, 3: call drain().
        """

    def watch(self, num_envs: int) -> bool:
        """
        Make the pool's eventfd readable when num_envs of the pending envs, or all, may be ready, or drain() may return something new. Return False if that is so already. A wait ends this.
        """

    def collect(self, max_envs: int, out: object | None = None, env_ids: object | None = None) -> tuple[Any, ...] | None:
        """
        Receive ready envs, longest-waiting first. Return the fields of a Batch, or None if a result cannot be read; its env then has a fault.
        """

    def collect_rows(self, env_ids: object) -> tuple[Any, dict[str, Any]] | None:
        """
        Receive these envs. Return the newest observations of all envs, and infos at their rows, or None as collect().
        """

    def collect_ready(self) -> tuple[Any, ...] | None:
        """
        Receive all envs if all are ready. Return Gymnasium's five values, else None.
        """

    @property
    def unclaimed(self) -> list[bool]:
        """
        A list of one flag: every call that receives results sets it, the pool clears it when it has them.
        """

    def restore_unclaimed(self) -> None:
        """
        Make the results of the last call that received some receivable again, since they did not reach the user.
        """

    def observe(self, env_ids: object | None = None) -> object:
        """Return the newest observations of envs, always copied."""

    def drain(self, acknowledge: bool) -> list[Any]:
        """
        Return the events of pool/events.py that a decision must follow, also those that were returned before. acknowledge: the caller handles them, so that later waits return 3 only for new ones.
        """

    def apply(self, decisions: Iterable[Any]) -> int:
        """
        Carry out decisions of pool/events.py, in order. Return how many were stale, and so dropped. If this raises, nothing has changed.
        """

    def discard_results(self, env_ids: object | None) -> None:
        """Drop the ready results of these envs."""

    def view(self, servers: Sequence[int] = (), *, env_ids: Sequence[int] = ()) -> list[Any]:
        """
        Return what is known of these servers, and of the servers of these envs: a ServerView of pool/events.py for each. env_ids from num_envs on: the servers in the queue.
        """

    def clear_dead_worker(self, worker: int) -> None:
        """
        Abort the commands of a worker that does not run any more. Call it before the successor starts, from any thread.
        """

    def num_ended(self, worker: int) -> int:
        """
        Return how many episodes the current process of a worker has completed.
        """

    def notify(self) -> None:
        """
        Make the current or next wait of the pool's thread return 3. From any thread.
        """

    def limit_logs(self, size_bytes: int) -> None:
        """Limit the memory of all episode logs."""

    def episode_log(self, env_id: int) -> dict[str, Any]:
        """
        Return what a crash capsule contains about an env's episode and its outstanding command.
        """

    def newest_outcome(self, env_id: int) -> tuple[float, int, int]:
        """
        Return reward, flags (1 terminated, 2 truncated) and observation hash of an env's newest result.
        """

    def positions(self, env_ids: object | None = None) -> list[dict[str, Any]]:
        """
        Return what is known of each env, without its object, for restore_positions().
        """

    def spare_positions(self) -> dict[str, Any] | None:
        """Return what is known of all servers, or None if there are no spares."""

    def restore_positions(self, env_ids: object | None, saved: list[dict[str, Any]], spares: dict[str, Any] | None) -> None:
        """
        Give envs saved positions, or one to all of them. Envs whose position has `is_replayed` are suspended until their replay.
        """

    def newest_batch(self) -> tuple[bool, tuple[Any, ...] | None]:
        """
        Return the newest results of all envs as collect() does, without receiving any, after whether there was a result since the start or a restore.
        """

    def usage(self) -> tuple[int, int]:
        """
        Return how many result slots are leased, and the bytes of all episode logs.
        """

    def release_staged(self, env_ids: object | None, *, is_whole: bool) -> None:
        """
        Before a reset: make the staged episodes of these envs their next results. is_whole: first assign each env to the server of its number, and queue the spares.
        """

    def states(self) -> list[int]:
        """Return per env the number of its EnvState."""

    def num_pending(self) -> int:
        """Return how many envs have a command whose result was not received."""

    def post_request(self, lane: int) -> None:
        """Notify a lane of a slow request in its mailbox."""

    def close(self) -> None:
        """
        Stop the workers, wake a waiter, and refuse further use. From any thread.
        """

    def release(self) -> None:
        """Drop all references to Python objects."""

class ExternalPoolLoop(Loop):
    """A proxy's side of the slab, for an external pool of envs."""

    def __init__(self, slab: Slab, worker: int, settings: dict) -> None: ...

    def receive_commands(self, may_wait: bool) -> tuple[int, Any, Any, list[tuple[int, Any, Any]] | None]:
        """
        Return new commands: (exit, servers, actions, resets). Releases the GIL while it waits.
        """

    def receive_command(self, server: int, after_ticket: int) -> tuple[int, Any, Any, list[tuple[int, Any, Any]] | None]:
        """
        Return the command of one server in the same form, if its ticket is at most after_ticket.
        """

    def publish(self, servers: object, obs: object, reward: object | None, terminated: object | None, truncated: object | None, infos: object | None) -> list[int]:
        """
        Write results: row j belongs to servers[j]. Return the servers that must be reset first (SAME_STEP).
        """

    def fail(self, servers: object, error: object, phase: str) -> None:
        """
        Publish an exception as the fault of those of these servers that have an outstanding command.
        """

    def outstanding(self) -> list[int]:
        """Return the servers whose command was received and has no result yet."""

    def num_outstanding(self) -> int:
        """Return how many servers have a received command without a result."""

def encode(obj: object, pickler: Callable[[object], bytes] | None) -> bytes:
    """
    Return `obj` as bytes, each part with its exact type; `pickler(part) -> bytes` encodes parts that the codec cannot.
    """

def decode(data: bytes, unpickler: Callable[[bytes], object] | None) -> object:
    """
    Return the object that `data` encodes. Raises ValueError if `data` is invalid; safe for any bytes.
    """

def decode_all(data: bytes, unpickler: Callable[[bytes], object] | None, objects: list[object] | None) -> tuple[object, ...]:
    """
    Return a tuple of the values that follow each other in `data`; `objects` are those that were passed by reference.
    """

class OwnedFd:
    """
    Owner of a file descriptor, which is closed once: by close(), from any thread, or with the owner.
    """

    def __init__(self, fd: int = -1) -> None:
        """Take ownership of a descriptor; -1: none."""

    @staticmethod
    def duplicate(fd: int) -> OwnedFd:
        """Return the owner of a duplicate. All descriptors are close-on-exec."""

    @staticmethod
    def memfd(name: str, *, can_be_sealed: bool = False) -> OwnedFd:
        """Return the owner of a new memfd."""

    @staticmethod
    def eventfd() -> OwnedFd:
        """Return the owner of a new event counter, at which no call waits."""

    @staticmethod
    def pidfd(pid: int) -> OwnedFd:
        """
        Return the owner of a descriptor that polls readable after the process has ended. Raises ProcessLookupError if there is no such process.
        """

    def fileno(self) -> int:
        """Return the descriptor, or -1 after close() or release()."""

    def release(self) -> int:
        """Transfer the descriptor to the caller. Returns -1 if there is none."""

    def close(self) -> None:
        """Close the descriptor, if it is still open."""

EXIT_LEARNER_GONE: int = 66

def watch_parent(pidfd: int) -> None:
    """
    End this process, by a native thread, as soon as the process behind `pidfd` has ended. Keeps a duplicate.
    """

def pidfd_send_signal(pidfd: int, signal: int) -> None:
    """
    Send a signal to the process behind `pidfd`. Raises ProcessLookupError after it has ended.
    """

def is_from_signal(error: BaseException) -> bool:
    """
    Return whether an exception is a KeyboardInterrupt, or a signal handler raised it.
    """

def begin_exit() -> None:
    """
    Record that this thread runs the program's exit functions. From now on SystemExit ends other threads that use a closed pool.
    """

def is_exiting() -> bool:
    """Return whether the program's exit functions run."""

def append_result(results: list, function: Callable) -> None:
    """
    Append what a function without arguments returns to a list. No signal handler can raise in between.
    """

def yields_fairly() -> bool:
    """
    Return whether sched_yield puts a thread behind all other runnable threads.
    """

def usable_cores() -> int:
    """
    Return the number of cores this process may use: affinity mask and cgroup quota, at least 1.
    """

class Reaper:
    """
    Watches workers and deadlines in a native thread, and turns deaths and hangs into faults.
    """

    def __init__(self, slab: Slab, step_timeout_s: float | None = None, reset_timeout_s: float | None = None, dump_signal: int = 0, call_timeout_s: float | None = None, attempts_timeout_s: float | None = None, pidfds: Mapping[int, int] = {}) -> None:
        """
        step_timeout_s, reset_timeout_s, call_timeout_s: limits of one step, reset, call. attempts_timeout_s: limit of a reset with all its attempts. pidfds: the processes to watch, by worker.
        """

    def watch(self, worker: int, pidfd: int = -1) -> None:
        """
        Watch a new worker: the process behind `pidfd` (duplicated), or a thread if it is -1.
        """

    def forget(self, worker: int) -> None:
        """Stop watching a worker, whose end is expected."""

    def declare_dead(self, worker: int) -> None:
        """Treat a worker thread that has ended as a process that died."""

    def record_answered(self, lane: int, num_requests: int) -> None:
        """
        Record that the first num_requests requests are answered: no deadline includes them.
        """

    def stop(self) -> None:
        """End the thread; idempotent. No deaths are noticed afterwards."""

KERNEL_ABI: int = 1

class KernelLoop:
    """The envs of a kernel, and the threads that run them."""

    def __init__(self, slab: Slab, settings: dict) -> None: ...

    def advance(self, is_waiting: bool) -> bool:
        """
        Begin new commands and, if is_waiting, run envs or wait for one. Return whether there was anything to do.
        """

    def run_until(self, server: int, after_ticket: int) -> None:
        """Finish the command of an env, if its ticket is at most after_ticket."""

    def stop(self, timeout_s: float) -> bool:
        """
        End the threads. Return False if one is still in an env; it is not joined.
        """

    def last_reported(self) -> int | None:
        """
        Return the env that was reported last because it did not return within step_timeout_s, or None. For any thread.
        """

    def state_of(self, server: int) -> Any:
        """Return a view of the bytes of an env's state."""

    def set_outside(self, outside: list[Any]) -> None:
        """
        Set for each env the KernelEnvMemory that is saved and restored with its state, or None.
        """

    def release(self) -> None:
        """Drop all references to Python objects."""

class PoolRelay:
    """
    The pool's side of the messages to one node, whose workers serve another slab.
    """

    def __init__(self, slab: Slab, workers: Sequence[int]) -> None:
        """workers: those of the node, by their numbers in the pool."""

    def collect_commands(self) -> Any | None:
        """Return the new commands as a message, a uint8 array, or None."""

    def publish_results(self, message: Any) -> tuple[list[int], int]:
        """
        Write the results of a message to the pool's slab. Return the workers that are dead, and how many results there were.
        """

    def has_outstanding(self) -> bool:
        """Return whether a collected command has no result."""

    def tickets_of(self, worker: int) -> list[int]:
        """Return the newest ticket of each server of a worker."""

    def is_published(self, worker: int, local: int, ticket: int) -> bool:
        """
        Return whether the result of a command, or of a later one of its server, is in the pool's slab.
        """

    def mark_serving(self, worker: int) -> None:
        """
        Record that a worker, whose node is lost, may have begun a slow request.
        """

    def expect_worker(self, worker: int, generation: int) -> None:
        """
        A successor serves: messages of its predecessors say nothing about it, and its counters begin again.
        """

class NodeRelay:
    """
    A node's side of the messages: it writes commands to the node's slab and reads results.
    """

    def __init__(self, slab: Slab) -> None: ...

    def apply_commands(self, message: Any) -> int:
        """
        Give the commands of a message to the workers, except those that came before. Return how many are new.
        """

    def wait(self, is_for_all: bool, timeout_s: float) -> bool:
        """
        Wait until all commands are done, or one, or a worker has died. Return False after the timeout or wake(). One thread at a time.
        """

    def wake(self) -> None:
        """End the wait of another thread, or the next one."""

    def collect_results(self) -> Any:
        """
        Return the results that were not collected before as a message, a uint8 array.
        """

    def num_outstanding(self) -> int:
        """
        Return how many commands have a result that was not collected, or none yet.
        """

    def ticket_after(self, worker: int, local: int, pool_ticket: int) -> int | None:
        """
        Return the number that a command has in the node's slab, or None if it has not arrived.
        """

    def post_request(self, worker: int) -> None:
        """Count a slow request for a worker, and ring its doorbell."""

    def set_tickets(self, worker: int, pool_tickets: Sequence[int]) -> None:
        """
        Set the pool's newest tickets of a worker's servers, whose commands are done or lost.
        """

    def clear_worker(self, worker: int) -> None:
        """
        Drop the commands of a worker that is gone, and rewrite its words for its successor.
        """

    def begin_generation(self, worker: int) -> None:
        """A successor serves."""

    def generation(self, worker: int) -> int:
        """Return how often a worker was restarted."""

    def stop(self) -> None:
        """Tell all workers to end, and wake the thread that waits."""
