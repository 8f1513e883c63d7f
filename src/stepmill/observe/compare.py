"""`stepmill bench`: compares the speed of vector envs on one env, which take turns in short rounds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, product
from multiprocessing import parent_process
from operator import methodcaller
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stepmill.observe.catalog import EnvChoice, find_env, search_current_directory
from stepmill.observe.exit_status import complain, first_line
from stepmill.spec.errors import StepmillError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

UNIT = "env-steps per second, automatic resets included"
NUM_DRAWS = 64
WARM_UP_S = 0.1
BATCH = "vector_entry_point"  # Gymnasium's name for it


@dataclass(frozen=True)
class Engine:
    """A vector env to measure: its name, how to open it, and how to close it even while a step is running."""

    name: str
    open: Callable[[], Any]
    close: Callable[[Any], None]


def engines_for(choice: EnvChoice, num_envs: int) -> list[Engine]:
    """Return Gymnasium's vector envs, with copy=False, and stepmill's, with its defaults, for the same env.

    Some ids of Gymnasium have a class of their own that steps all envs in one call, such as CartPole's, which computes with NumPy.
    """
    import gymnasium
    from gymnasium.vector import SyncVectorEnv

    import stepmill

    env_fns = [partial(make_env, choice.make)] * num_envs
    close = methodcaller("close")
    open_stepmill = partial(stepmill.VectorEnv, env_fns, start={"show_progress": False})
    spec = gymnasium.registry.get(choice.env_id)
    has_batch = spec is not None and spec.vector_entry_point is not None
    env_kwargs: dict[str, Any] = dict(choice.env_kwargs)
    make_batch = partial(gymnasium.make_vec, choice.env_id, num_envs, BATCH, **env_kwargs)
    return [
        *[Engine("gymnasium make_vec", make_batch, close)] * has_batch,
        # By force: after a Ctrl-C its workers may be in the middle of a step.
        Engine("gymnasium AsyncVectorEnv", partial(_open_async, env_fns), methodcaller("close", terminate=True)),
        Engine("gymnasium SyncVectorEnv", partial(SyncVectorEnv, env_fns, copy=False), close),
        Engine("stepmill serial", partial(open_stepmill, backend="serial"), close),
        Engine("stepmill process", partial(open_stepmill, backend="process"), close),
    ]


def _open_async(env_fns: Sequence[Callable[[], gymnasium.Env[object, object]]]) -> VectorEnv:
    """Open Gymnasium's AsyncVectorEnv, with shared memory unless it has none for the env's space."""
    from gymnasium.vector import AsyncVectorEnv

    try:
        return AsyncVectorEnv(env_fns, copy=False)
    except ValueError as error:
        if "shared_memory" not in str(error):
            raise
        return AsyncVectorEnv(env_fns, copy=False, shared_memory=False)


def make_env(make: Callable[[], Any]) -> Any:
    """Build an env for any engine. OpenCV gets one thread; Gymnasium's workers ignore Ctrl-C and print no traceback."""
    if parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if find_spec("cv2") is not None:
        import cv2

        cv2.setNumThreads(1)
    return make()


def compare_engines(
    engines: Sequence[Engine], num_rounds: int, round_s: float, on_round: Callable[[int], None]
) -> dict[str, float]:
    """Return each engine's median rate over the rounds, in env-steps/s. `on_round` is called with the number of the round.

    All engines are open at the same time and take turns in short rounds, so that a disturbance affects all of them alike.
    Every row that `step` returns is counted, including automatic resets, because the vector envs do not tell them apart.
    A short warm-up comes first and is not counted. An engine of another library that fails is left out, with a message.
    """
    with ExitStack() as opened:
        running: dict[str, tuple[Any, Iterator[object]]] = {}  # a vector env, and the actions to step it with
        for engine in engines:
            with _leave_out_failed(engine.name):
                envs = engine.open()
                opened.callback(engine.close, envs)
                envs.action_space.seed(0)
                actions = [envs.action_space.sample() for _ in range(NUM_DRAWS)]  # sampling is not measured
                envs.reset(seed=0)
                running[engine.name] = (envs, cycle(actions))
        rates: dict[str, list[float]] = {name: [] for name in running}
        for (number, limit_s), name in product(enumerate([WARM_UP_S, *[round_s] * num_rounds]), rates):
            if len(rates[name]) < number:
                continue  # it has failed
            with _leave_out_failed(name):
                rates[name].append(_run_round(*running[name], limit_s))
            on_round(number)
    return {name: median(found[1:]) for name, found in rates.items() if len(found) > num_rounds}


@contextmanager
def _leave_out_failed(engine: str) -> Iterator[None]:
    """Report an error of another library, and continue without that engine."""
    try:
        yield
    except StepmillError:
        raise
    except Exception as error:
        complain(f"{engine} failed and is left out: {type(error).__name__}: {first_line(str(error))}")


def _run_round(envs: Any, actions: Iterator[object], round_s: float) -> float:
    """Step for about `round_s` seconds, read an element of each result, and return env-steps/s."""
    num_batches, elapsed_s, begun_s = 0, 0.0, perf_counter()
    while elapsed_s < round_s:
        _, reward, *_ = envs.step(next(actions))
        _ = reward[0]
        num_batches += 1
        elapsed_s = perf_counter() - begun_s
    return float(num_batches * envs.num_envs / elapsed_s)


# ---- the command -------------------------------------------------------------------------------------------------------


def run_bench(
    env_id: str,
    num_envs: int,
    *,
    rounds: int,
    round_seconds: float,
    env_kwargs: dict[str, object] | None,
    is_json: bool,
    quiet: bool,
) -> None:
    """Measure the engines, and print their rates.

    Raises:
        UsageError: the env is unknown.
    """
    from stepmill.observe.progress import show_progress

    search_current_directory()
    choice = find_env(env_id, env_kwargs=env_kwargs)
    engines = engines_for(choice, num_envs)
    with show_progress(f"{len(engines)} engines, rounds", rounds, is_quiet=quiet) as show:
        rates = compare_engines(engines, rounds, round_seconds, show)
    if is_json:
        print(json.dumps({"env": choice.env_id, "num_envs": num_envs, "steps_per_s": rates}, indent=2), flush=True)
    else:
        print(f"{num_envs} x {choice.env_id}, {UNIT}", *text_bars(rates), *_conclude(rates), sep="\n", flush=True)


def _conclude(rates: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence that compares stepmill's faster backend with the fastest of Gymnasium's classes."""
    owned = [
        [(rate, name) for name, rate in rates.items() if name.startswith(owner)] for owner in ("stepmill", "gymnasium")
    ]
    if all(owned):
        (ours, name), (theirs, other) = map(max, owned)
        gain, other = ours / theirs, other.removeprefix("gymnasium ")
        in_one = "which steps all envs in one call, as stepmill does with backend='kernel' or 'envpool'"
        which = in_one if other == "make_vec" else "Gymnasium's fastest class here"
        yield f"Without a learner, {name} takes {gain:.2f} times as many steps per second as {other}, {which}."


def text_bars(values: Mapping[str, float], width: int = 40) -> Sequence[str]:
    """Return a chart with one horizontal bar per name, the largest value first, as lines of text."""
    largest = max(values.values(), default=0.0) or 1.0
    longest = max((len(name) for name in values), default=0)
    return [
        f"{name:<{longest}}  {'█' * round(value / largest * width):<{width}}  {value:,.0f}"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
    ]
