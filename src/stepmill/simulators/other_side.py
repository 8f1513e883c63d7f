"""The program that another interpreter runs: it makes one env there, and steps it when the worker asks.

The worker sends this file to the interpreter. The file therefore imports nothing of stepmill, needs Python 3.6 and NumPy only,
and keeps to the syntax of Python 3.6. The worker imports it too, for `Codec` and `Stream`.

    worker ─ stdin ──► guard process: no env, no NumPy. It ends the simulator when the worker has closed the pipe or is dead
                         └─► simulator: serve(), one request after the other
    worker ◄─ stdout ── BEGIN, then the answers. What an env prints goes to stderr.

A request is (number, operation, arguments), an answer (number, status, value): pickles of plain data, which all versions of
Python read. An answer comes after its size.
"""

import inspect
import io
import mmap
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any, Dict, List, Optional, Tuple

# Seconds: a turn of other threads is longer than the first, and after a pause of the others a wait spins again.
_LOST_S, _MIN_PAUSE_S, _MAX_PAUSE_S = 1e-4, 5e-3, 1.0
BEGIN = b"\nstepmill: the simulator begins\n"
OK, RAISED, IS_CALLABLE, IS_MISSING = range(4)  # the status of an answer
FIRST_SIGNAL = 128  # the exit status is this and the signal's number if a signal has ended the simulator, as in shells
EXIT_STRAY_COPY = 67  # the exit status of a copy that an env forked
TOKEN_BYTES = 64  # the shared memory begins with random bytes, by which both sides know that it is the same memory
_SMALL_BYTES = 512  # smaller arrays are sent in the message
SIZE_BYTES = 8  # of the size of an answer, which comes before it
_BASES: Tuple[Any, ...] = (int, float, complex, str, bytes, dict, list, tuple, set, frozenset)
_PLAIN = frozenset((type(None), bool) + _BASES)
_CAN = "numbers, texts, bytes, lists, tuples, dicts, sets and arrays of numbers can; convert it in the env"
_PARTS = {"step": ("observation", "reward", "terminated", "truncated", "info"), "reset": ("observation", "info")}
_SPACES = frozenset("Box Discrete MultiDiscrete MultiBinary Text Dict Tuple OneOf Sequence Graph".split())
# The attributes of spaces whose arguments have other names. The seed is not sent.
_ATTRIBUTES = {"space": "feature_space", "charset": "character_set", "seed": ""}
_PR_SET_PDEATHSIG = 1
_HANGUP = getattr(select, "POLLRDHUP", 0x2000)  # of a socket; that of a pipe is always reported

Answer = Tuple[int, Any]  # the status and the value
np: Any = None


def load_numpy() -> None:
    """Import NumPy. The guard process does without it."""
    global np
    if find_spec("numpy") is None:
        sys.exit("it has no NumPy, which stepmill needs there; install it: " + sys.executable + " -m pip install numpy")
    np = import_module("numpy")


class CannotCarry(TypeError):
    """A value is neither plain data nor an array."""


class Codec(pickle.Pickler):
    """Turns values into bytes. Arrays are copied to the shared memory, if there is any, from its beginning for each message."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        pickle.Pickler.__init__(self, self._file, 4)
        self.fast = True  # without a memo
        self.area: Any = None  # uint8 [size]
        self._used = 0  # of it, by this message

    def dumps(self, *values: object) -> bytes:
        """Return a message. Hot path.

        Raises:
            CannotCarry: a part of the last value is neither plain data nor an array. The text has the keys that lead to it.
        """
        self._used = TOKEN_BYTES
        self._file.seek(0)
        self._file.truncate()
        try:
            self.dump(values)
        except CannotCarry:
            self._find_part(values[-1])
            raise
        return self._file.getvalue()

    def _find_part(self, value: Any) -> None:
        """Raise the exception of the first part of a value that cannot be sent, with the keys that lead to it."""
        items: Any = enumerate(value) if isinstance(value, (list, tuple)) else getattr(value, "items", tuple)()
        for key, item in items:
            try:
                self.dumps(item)
            except CannotCarry as error:
                raise CannotCarry("[{!r}]{}".format(key, error))

    def persistent_id(self, value: Any) -> Any:
        """Return None for plain data, and a tuple of plain data for other values. Hot path."""
        if type(value) in _PLAIN:
            return None
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (str, bytes, np.ma.MaskedArray)):
            if value.dtype.kind in "biufcSUmM":
                return isinstance(value, np.generic), value.dtype.str, value.shape, self._place(value)
        for base in _BASES:
            if isinstance(value, base) and not isinstance(value, np.number):
                is_graph = type(value).__name__ == "GraphInstance"
                return is_graph, str.__str__(value) if base is str else base(value)
        kind, dtype = type(value), getattr(value, "dtype", "")
        name = "{}.{}{}".format(kind.__module__, kind.__name__, dtype and " of dtype {}".format(dtype))
        raise CannotCarry(" is a {}, which cannot be sent to another Python: {}".format(name, _CAN))

    def _place(self, array: Any) -> Any:
        """Return the bytes of an array, or where they are in the shared memory."""
        begin, end = self._used, self._used + array.nbytes
        if end < begin + _SMALL_BYTES or self.area is None or end > len(self.area):
            return array.tobytes()
        self.area[begin:end].view(array.dtype).reshape(array.shape)[...] = array
        self._used = -(-end // 64) * 64
        return begin


class Decoder(pickle.Unpickler):
    """Reads messages of a file. Arrays are copies."""

    area: Any = None

    def persistent_load(self, replaced: Any) -> Any:
        """Return the value for which `persistent_id` has returned a tuple. Hot path."""
        if len(replaced) == 4:
            is_scalar, name, shape, data = replaced
            place = (data,) if type(data) is bytes else (self.area, data)
            array = np.ndarray(shape, name, *place)
            return array[()] if is_scalar else array.copy()
        is_graph, value = replaced
        if not is_graph:
            return value
        library = "gymnasium" if "gymnasium" in sys.modules else "gym"
        return import_module(library + ".spaces.graph").GraphInstance(*value)

    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything that is not plain data."""
        raise CannotCarry("{}.{} is not plain data".format(module, name))


class Waiter:
    """Waits for events. If its last wait was short, it does not sleep at first: to wake up takes longer than a step of a fast env.

    Attributes:
        poller: the poller of the descriptors.
        spin_s: what is short, in seconds.
    """

    def __init__(self, events: Dict[int, int], spin_s: float = 0.0) -> None:
        self.poller, self.spin_s, self._was_short = select.poll(), spin_s, False
        self._sleeps_until_s, self._pause_s = 0.0, _MIN_PAUSE_S
        for fd, event in events.items():
            self.poller.register(fd, event)

    def wait(self, timeout_ms: Optional[float] = None) -> List[Tuple[int, int]]:
        """Return the events, which are none after the timeout. Hot path."""
        ready: List[Tuple[int, int]] = []
        now_s = time.monotonic()
        end_s, may_spin = now_s + self.spin_s, self._was_short and now_s > self._sleeps_until_s
        while may_spin and not ready:
            os.sched_yield()
            ready, before_s, now_s = self.poller.poll(0), now_s, time.monotonic()
            may_spin = now_s < min(end_s, before_s + _LOST_S)
            if now_s >= before_s + _LOST_S:  # others need the core; a thread that sleeps gets it sooner
                self._sleeps_until_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
            elif ready:
                self._pause_s = _MIN_PAUSE_S
        ready = ready or self.poller.poll(timeout_ms)
        self._was_short = time.monotonic() < end_s
        return ready


# ---- the env -----------------------------------------------------------------------------------------------------------


def find_make(name: str) -> Any:
    """Return the function that "module:function" or "path/file.py:function" names."""
    home, _, path = name.rpartition(":")
    if not home.endswith(".py"):
        return find(import_module(home), path)
    folder, file = os.path.split(os.path.abspath(home))
    sys.path.insert(0, folder)
    spec: Any = spec_from_file_location(file[: -len(".py")], home)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return find(module, path)


def find(thing: Any, path: str) -> Any:
    """Return the attribute that a dotted path names, searched through the wrappers of an env."""
    for name in path.split("."):
        through = getattr(thing, "get_wrapper_attr", None)
        thing = getattr(thing, name) if through is None else through(name)
    return thing


def describe_space(space: Any, path: str) -> Any:
    """Return a space of Gymnasium or gym as plain data: the name of its class, and the arguments that make it again."""
    if space is None:
        return None
    for kind in type(space).__mro__:
        if kind.__name__ in _SPACES and kind.__module__.partition(".")[0] in ("gym", "gymnasium"):
            names = [(name, _ATTRIBUTES.get(name, name)) for name in _parameters(kind)]
            parts = {name: getattr(space, attribute) for name, attribute in names if hasattr(space, attribute)}
            return kind.__name__, {name: _describe_part(part, path) for name, part in parts.items()}
    what = "{} has a {}.{}, and other Pythons know only the spaces of Gymnasium; wrap the env in one with such a space"
    raise CannotCarry(what.format(path, type(space).__module__, type(space).__name__))


def _describe_part(part: Any, path: str) -> Any:
    """Return an attribute of a space as plain data."""
    if hasattr(part, "sample"):
        return describe_space(part, path)
    if hasattr(part, "items"):
        return [(key, describe_space(each, "{}[{!r}]".format(path, key))) for key, each in part.items()]
    if isinstance(part, (list, tuple)):
        return [_describe_part(each, "{}[{}]".format(path, index)) for index, each in enumerate(part)]
    return np.dtype(part).str if isinstance(part, (np.dtype, type)) else part


def _parameters(function: Any) -> Any:
    with suppress(TypeError, ValueError):
        return inspect.signature(function).parameters
    return {}


class EnvCalls:
    """The operations on one env: each is a method, which returns the status and the value of the answer."""

    def __init__(self, env: Any) -> None:
        self.env = env
        inner = getattr(env, "unwrapped", env)
        accepted = _parameters(getattr(inner, "reset", None))
        is_gymnasium = any(cls.__module__.partition(".")[0] == "gymnasium" for cls in type(inner).__mro__)
        self._has_options = is_gymnasium or "options" in accepted
        self._has_seed = is_gymnasium or "seed" in accepted or not callable(getattr(inner, "seed", None))
        self._observes_tuples = type(getattr(env, "observation_space", None)).__name__ == "Tuple"
        is_old = getattr(env, "render_mode", None) is None and "mode" in _parameters(getattr(inner, "render", None))
        self._render_arguments = {"mode": "rgb_array"} if is_old else {}

    def describe(self) -> Dict[str, Any]:
        """Return the env's spaces, render mode and metadata."""
        names = "observation_space", "action_space", "reward_space"
        found: Dict[str, Any] = {name: describe_space(getattr(self.env, name, None), name) for name in names}
        found["render_mode"] = self._render_arguments.get("mode", getattr(self.env, "render_mode", None))
        found["metadata"] = {}
        for key, value in dict(getattr(self.env, "metadata", None) or {}).items():
            with suppress(CannotCarry):  # it is for information only, and often has classes and enums
                Codec().dumps(value)
                found["metadata"][key] = value
        return found

    def step(self, action: Any) -> Answer:
        """Return the five values of Gymnasium. Hot path."""
        result = self.env.step(action)
        if len(result) != 4:
            return OK, tuple(result)
        obs, reward, done, info = result
        is_truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return OK, (obs, reward, bool(done) and not is_truncated, is_truncated, info)

    def reset(self, seed: Optional[int], options: Optional[Dict[str, Any]]) -> Answer:
        """Begin an episode. The seed and the options are passed in the way of the env's API; return (observation, info)."""
        arguments: Dict[str, Any] = dict(options or {})
        if self._has_options and options is not None:
            arguments = {"options": options}
        if seed is not None and self._has_seed:
            arguments["seed"] = seed
        elif seed is not None:
            self.env.seed(seed)
        result = self.env.reset(**arguments)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        if is_pair and self._observes_tuples:  # else the pair is the observation
            is_pair = isinstance(result[0], tuple)
        return OK, result if is_pair else (result, {})

    def render(self) -> Answer:
        """Return the picture."""
        return OK, self.env.render(**self._render_arguments)

    def call(self, path: str, args: List[Any], kwargs: Dict[str, Any]) -> Answer:
        """Call a method of the env."""
        return OK, find(self.env, path)(*args, **kwargs)

    def get(self, path: str) -> Answer:
        """Return an attribute, or that it is a method."""
        try:
            value = find(self.env, path)
        except AttributeError as error:
            return IS_MISSING, str(error)
        return (IS_CALLABLE, None) if callable(value) else (OK, value)

    def set(self, path: str, value: Any) -> Answer:
        """Set an attribute, on the wrapper that has it if the env supports that."""
        holder, _, name = path.rpartition(".")
        thing = find(self.env, holder) if holder else self.env
        through = getattr(thing, "set_wrapper_attr", None)
        setattr(thing, name, value) if through is None else through(name, value)
        return OK, None

    def close(self) -> Answer:
        """Close the env, if it has a method `close`."""
        return OK, getattr(self.env, "close", tuple)() and None


# ---- the two processes -------------------------------------------------------------------------------------------------


def serve(read_fd: int, write_fd: int) -> None:
    """Make the env that the first request asks for, and answer requests until the worker closes the pipe."""
    own_pid, codec, requests = os.getpid(), Codec(), Decoder(os.fdopen(read_fd, "rb"))
    answers, waiter = os.fdopen(write_fd, "wb"), Waiter({read_fd: select.POLLIN})
    calls: Any = None
    load_numpy()
    answers.write(BEGIN)
    while True:
        answers.flush()
        waiter.wait()
        number, operation, arguments = requests.load()
        try:
            if calls is None:
                place, make, kwargs, waiter.spin_s = arguments
                shares = share((codec, requests), *place)
                calls = EnvCalls(find_make(make)(**kwargs))
                answer = OK, dict(calls.describe(), shares=shares)
            else:
                answer = getattr(calls, operation)(*arguments)
            reply = codec.dumps(number, *answer)
        except CannotCarry as error:
            reply = codec.dumps(number, RAISED, ("TypeError", _name_part(operation, str(error)), ""))
        except BaseException as error:  # an env may raise SystemExit, too
            reply = codec.dumps(number, RAISED, describe(error))
        if os.getpid() != own_pid:  # the env forked, and this is the copy, which must not answer, too
            os._exit(EXIT_STRAY_COPY)
        answers.write(len(reply).to_bytes(SIZE_BYTES, "little") + reply)


def share(users: Tuple[Any, ...], path: str, token: bytes) -> bool:
    """Map the memory of the worker. Return False if this process is on another machine or in another container."""
    with suppress(OSError, ValueError), open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        if memory[: len(token)] == token:
            for user in users:
                user.area = np.frombuffer(memory, np.uint8)
            return True
    return False


def _name_part(operation: str, text: str) -> str:
    """Return the text of a CannotCarry with the name of the part of the result in place of its index."""
    for index, name in enumerate(_PARTS.get(operation, ())):
        if text.startswith("[{}]".format(index)):
            return name + text[3:]
    return text if text[0] != " " and text[0] != "[" else "the result" + text


def describe(error: BaseException) -> Tuple[str, str, str]:
    """Return the class, the text and the traceback of an exception."""
    cls, trace = type(error), error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next  # frames of this file
    name = cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else cls.__module__ + "." + cls.__qualname__
    try:
        texts = [str(error), "".join(traceback.format_exception(cls, error, trace))]
    except BaseException:  # its methods may raise anything
        texts = ["(its text could not be read)", "".join(traceback.format_tb(trace))]
    text, lines = (each.encode("utf-8", "backslashreplace").decode() for each in texts)
    return name, text, lines


def guard(pid: int, read_fd: int) -> None:
    """Wait until the simulator ends, or the worker closes the pipe or dies. Then end the simulator with its children.

    SIGTERM is for workers whose copies in other processes still hold the pipe.
    """

    def end(*_: object) -> None:
        for kill in (os.kill, os.killpg):
            with suppress(OSError):  # it has ended, or has not made its group yet
                kill(pid, signal.SIGKILL)

    def watch() -> None:
        Waiter({read_fd: _HANGUP}).wait()
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()
    status = os.waitpid(pid, 0)[1]
    end()
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else FIRST_SIGNAL + os.WTERMSIG(status))


def main() -> None:
    """Fork the simulator, and guard it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    read_fd, write_fd, guard_pid = os.dup(0), os.dup(1), os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what is printed must not get between the messages
    sys.stdout = sys.stderr
    pid = os.fork()
    if pid:
        os.close(write_fd)
        guard(pid, read_fd)
    os.setpgid(0, 0)  # a group of its own, with all that the env forks
    with suppress(ImportError):  # the guard may be killed, too
        import_module("ctypes").CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == guard_pid:
        serve(read_fd, write_fd)
    os._exit(0)
