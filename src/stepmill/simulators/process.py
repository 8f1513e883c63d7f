"""The process of another interpreter: starts it, exchanges messages with it, and ends it.

The worker owns the ends of pipes, which are stdin, stdout and stderr of the process. When stdin is closed, by the worker or
by the end of the worker, the guard process of `other_side.py` ends the simulator and everything that it has started.
"""

from __future__ import annotations

import io
import mmap
import os
import select
import shlex
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from stepmill import _native
from stepmill.simulators import other_side
from stepmill.spec.remote_env import CallTooLate, RemoteError

other_side.load_numpy()

_CLOSE_S = 5.0  # how long an env may take to close
_END_S = 2.0  # how long the guard process may take to end the simulator
_AREA_BYTES = 1 << 26  # of address space; only what messages have filled takes memory
_READ_BYTES = 1 << 16
_TAIL_BYTES = 4096  # of what was printed last
_TAIL_LINES, _TAIL_LINE_LENGTH = 10, 200  # of that, in errors
_MAX_BANNER_BYTES = 1 << 20
_RESET = "reset the env, which starts another"
_ADVICE = "it must be Python 3.6 or newer, or a command that ends with one and passes stdin on (docker run -i, no -t)"
# One line, because some commands pass their arguments through a shell. It reads the program from stdin.
_LOADER = (
    "import os,sys;sys.version_info>=(3,6) or sys.exit('stepmill needs Python 3.6 or newer, and this is '+sys.version);"
    "r=lambda n,d=b'':d if len(d)==n else r(n,d+(os.read(0,n-len(d)) or sys.exit('stepmill: stdin is closed')));"
    "s={{'__name__':'stepmill_other_side'}};exec(compile(r({size}),'stepmill/simulators/other_side.py','exec'),s);s['main']()"
)


class SimulatorError(RemoteError):
    """The process of a simulator did not begin, or has ended. The text says why, and what it printed last."""

    def __init__(self, message: str, *_: str) -> None:
        super().__init__("stepmill.SimulatorError", message, "")


class SimulatorProcess:
    """The process of one env. Only one thread uses it at a time.

    Attributes:
        end: what has happened to the process; empty while it runs.
    """

    def __init__(self, command: Sequence[str], spin_s: float) -> None:
        """Start a command, which must be that of a Python. `spin_s`: how long both sides wait without sleep after a short wait.

        Raises:
            SimulatorError: there is no such program.
        """
        self._unsent = Path(other_side.__file__).read_bytes()  # the program, which goes before the first request
        self._command, pipe = shlex.join(command), subprocess.PIPE
        self._codec, self._arrived, self._tail = other_side.Codec(), bytearray(), b""
        self._number = self._answered = 0  # of the last request, and of the last request that was answered
        self._has_begun, self.end = False, ""
        words, environ = _with_loader(command, len(self._unsent)), os.environ.copy()
        environ.pop("PYTHONHOME", None)  # it is of this Python
        try:  # Ctrl-C on a terminal is for the learner
            self._process = subprocess.Popen(words, 0, None, pipe, pipe, pipe, env=environ, start_new_session=True)
        except OSError as exc:
            advice = "give python= the path of an interpreter, or a command as a list of words"
            raise SimulatorError(f"{self._command!r} cannot be started: {exc}; {advice}") from exc
        pidfd = _native.OwnedFd.pidfd(self._process.pid)
        pipes: tuple[Any, ...] = self._process.stdin, self._process.stdout, self._process.stderr, pidfd
        self._requests, self._answers, self._errors, self._pidfd = (each.fileno() for each in pipes)
        self._finalizer = weakref.finalize(self, _end, self._process, pipes, os.getpid())
        events = dict.fromkeys((self._answers, self._errors, self._pidfd), select.POLLIN)
        self._waiter = other_side.Waiter(events, spin_s)
        for fd in (self._requests, self._errors):
            os.set_blocking(fd, False)

    def begin(self, make: str, kwargs: Mapping[str, object], limit_s: float | None) -> dict[str, Any]:
        """Make the env. Return what `other_side.EnvCalls.describe` says of it.

        Raises:
            SimulatorError: the command does not run the program, has no NumPy, or takes longer than `limit_s`.
            RemoteError: the function that makes the env raised an exception, or there is no such function.
        """
        token = os.urandom(other_side.TOKEN_BYTES)
        with closing(_native.OwnedFd.memfd("stepmill-simulator")) as fd:
            os.truncate(fd.fileno(), _AREA_BYTES)
            memory = mmap.mmap(fd.fileno(), 0)
            memory[: len(token)] = token
            self._area = np.frombuffer(memory, np.uint8)
            try:
                place = f"/proc/{os.getpid()}/fd/{fd.fileno()}", token
                described = self.request("begin", place, make, kwargs, self._waiter.spin_s, limit_s=limit_s)[1]
            except CallTooLate:
                what = f"return from {make!r}" if self._has_begun else "begin to run stepmill's program"
                raise self._start_error(f"did not {what} in {limit_s:g} s (start.timeout_s)") from None
        if described.pop("shares"):
            self._codec.area = self._area
        return dict(described)

    def request(self, operation: str, *arguments: object, limit_s: float | None = None) -> tuple[int, Any]:
        """Call a method of `other_side.EnvCalls`, and return its answer. Hot path.

        Raises:
            RemoteError: the env raised an exception.
            SimulatorError: the process has ended.
            CallTooLate: the call took longer than `limit_s`. The process was ended.
        """
        if self.end:
            raise SimulatorError(f"the simulator's process {self.end}; {_RESET}")
        self._limit_s, self._deadline = limit_s, time.monotonic() + (limit_s or 0.0)
        while self._answered != self._number:  # the answer to an interrupted request would overwrite the shared memory
            self._receive()
        try:
            data = self._codec.dumps(self._number + 1, operation, arguments)
        except other_side.CannotCarry as error:
            raise TypeError("the argument" + str(error).partition("]")[2]) from None
        self._number, data, self._unsent = self._number + 1, self._unsent + data, b""
        self._send(data)
        status, answer = self._receive()
        if status == other_side.RAISED:
            raise RemoteError(*answer)
        return status, answer

    def close(self) -> None:
        """Close the env, and end the process.

        Raises:
            RemoteError, CallTooLate: the env raised an exception, or was too slow.
        """
        try:
            with suppress(SimulatorError):
                self.request("close", limit_s=_CLOSE_S)
        finally:
            self.kill("was closed")

    def kill(self, end: str) -> None:
        """End the process. `end` says what has happened to it."""
        self.end = self.end or end
        self._finalizer()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _receive(self) -> tuple[int, Any]:
        """Return the status and the value of the next answer."""
        begin = other_side.SIZE_BYTES
        while not self._has_begun or len(self._arrived) < begin + int.from_bytes(self._arrived[:begin], "little"):
            self._wait()
        decoder = other_side.Decoder(io.BytesIO(self._arrived[begin:]))
        decoder.area, self._arrived = self._area, bytearray()
        self._answered, status, answer = decoder.load()
        return status, answer

    def _send(self, data: bytes) -> None:
        try:
            while data:
                try:
                    data = data[os.write(self._requests, data) :]
                except BlockingIOError:
                    self._waiter.poller.register(self._requests, select.POLLOUT)
                    self._wait()
                    self._waiter.poller.unregister(self._requests)
        except BrokenPipeError:
            raise self._ended() from None
        except KeyboardInterrupt:  # half a message may have been sent
            self.kill("was ended, because a request was interrupted")
            raise

    def _wait(self) -> None:
        """Wait until something arrives, or a request can be written. Pass on what is printed. Hot path.

        Raises:
            SimulatorError: the process has ended.
            CallTooLate: the limit has passed. The process was ended.
        """
        left_ms = None if self._limit_s is None else max(0.0, 1e3 * (self._deadline - time.monotonic()))
        ready = dict(self._waiter.wait(left_ms))
        if self._errors in ready:
            self._pass_on_errors()
        if self._answers in ready:
            data = os.read(self._answers, _READ_BYTES)
            if not data:
                raise self._ended()
            self._arrived += data
            if not self._has_begun:
                self._skip_banner()
        elif self._pidfd in ready:
            raise self._ended()
        elif not ready:
            self.kill("was ended, because it was too late")
            raise CallTooLate(self._limit_s or 0.0)

    def _skip_banner(self) -> None:
        """Pass on as errors what the command has printed before the program began."""
        banner, begin, rest = self._arrived.partition(other_side.BEGIN)
        if begin or len(banner) > _MAX_BANNER_BYTES:
            self._print(bytes(banner))
            self._has_begun, self._arrived = bool(begin), rest

    def _pass_on_errors(self) -> bool:
        """Pass on what was printed. Return False if there is nothing more."""
        with suppress(BlockingIOError):
            if data := os.read(self._errors, _READ_BYTES):
                self._print(data)
                return True
            self._waiter.poller.modify(self._errors, 0)
        return False

    def _print(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        with suppress(OSError), open(2, "wb", closefd=False) as file:
            file.write(data)

    # ---- the end ------------------------------------------------------------------------------------------------------

    def _ended(self) -> SimulatorError:
        """Return the error of a process that has ended by itself."""
        end = "has closed its stdout"
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_END_S)
            names = {n: each.name for each in signal.Signals for n in (-each, other_side.FIRST_SIGNAL + each)}
            # An env may also exit with the status of a signal.
            note = f" ({other_side.FIRST_SIGNAL} + {names[status]})" if status in names else ""
            end = f"was ended by {names[status]}" if status < 0 and note else f"ended with exit status {status}{note}"
        while self._pass_on_errors():
            pass
        self.kill(end)
        if not self._has_begun:
            self._print(bytes(self._arrived))
            return self._start_error(f"{end} before it ran stepmill's program")
        return SimulatorError(f"the simulator's process {end}; {self._last_lines()}; {_RESET}")

    def _start_error(self, what: str) -> SimulatorError:
        return SimulatorError(f"the command {self._command!r} {what}; {self._last_lines()}; {_ADVICE}")

    def _last_lines(self) -> str:
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]
        shown = "\n".join(line[-_TAIL_LINE_LENGTH:] for line in lines)
        return f"its last lines on stderr: {shown}" if lines else "it has printed nothing"


def _end(process: subprocess.Popen[bytes], pipes: Sequence[Any], owner: int) -> None:
    """Close the pipes, and wait until the process has ended."""
    if os.getpid() != owner:
        return
    for pipe in pipes:
        pipe.close()
    for number in (signal.SIGTERM, signal.SIGKILL):  # a fork of this process may still hold the pipes
        with suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(_END_S)
    process.wait()


def _with_loader(command: Sequence[str], size: int) -> list[str]:
    """Return the command with the argument that loads the program."""
    loader, words = _LOADER.format(size=size), list(command)
    program = os.path.basename(words[0])
    if program == "ssh":  # the shell of the other machine reads it
        loader = shlex.quote(loader)
    if program in ("conda", "mamba") and "run" in words and "--no-capture-output" not in words:
        words.insert(words.index("run") + 1, "--no-capture-output")  # it would collect the output until the end
    return [*words, "-c", loader]
