"""`worker_fn` and `worker_fn_robust`: the loop of a process that runs one env for DI-engine, for code that starts its own.

The managers of this package do not use it: their workers run stepmill's loop. A request is a list [name, args, kwargs] that is
sent over a pipe; the reply is the result, or the exception that the env raised.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from stepmill.envs.di_engine_managed import is_abnormal, render_frame, time_limit
from stepmill.worker.process_setup import limit_threads

logger = logging.getLogger("stepmill.di_engine")


def is_abnormal_timestep(timestep: Any) -> bool:
    """Whether the info of a timestep has "abnormal"; of a list or tuple of infos, whether one of the first two has it.

    Raises:
        TypeError: the info is neither a dict nor a list or tuple.
    """
    return is_abnormal(timestep.info)


def worker_fn(
    p: Any, c: Any, env_fn_wrapper: Any, obs_buffer: Any, method_name_list: Sequence[str], reset_inplace: bool = False
) -> None:
    """Make an env and run the requests that arrive, until "close", or until the other end of the pipe is closed.

    Args:
        p, c: the other end of the pipe, which is closed here, and this end.
        env_fn_wrapper: `env_fn_wrapper.data` makes the env.
        obs_buffer: `obs_buffer.fill(obs)` receives observations, which are then None in replies; None sends them.
        method_name_list: the names that requests may have, in addition to "getattr".
        reset_inplace: True makes a step that ends an episode reset the env, and return the first observation of the next episode.
    """
    _serve((p, c), env_fn_wrapper, obs_buffer, method_name_list, {"reset_inplace": reset_inplace})


def worker_fn_robust(
    parent: Any,
    child: Any,
    env_fn_wrapper: Any,
    obs_buffer: Any,
    method_name_list: Sequence[str],
    *limits: Any,
    **named_limits: Any,
) -> None:
    """Like `worker_fn`, with time limits.

    Unlike in DI-engine, a limit is exact and may be a fraction of a second, and an env whose reset fails is not
    closed. A limit does not end native code.

    Args:
        parent, child: like `p` and `c` of `worker_fn`; the next three arguments are the same.
        *limits, **named_limits: reset_timeout and step_timeout, in seconds, after which a TimeoutError is returned (None means
            no limit); and reset_inplace, as for `worker_fn`.
    """
    _serve((parent, child), env_fn_wrapper, obs_buffer, method_name_list, _read_limits(*limits, **named_limits))


def _read_limits(
    reset_timeout: float | None = None, step_timeout: float | None = None, reset_inplace: bool = False
) -> dict[str, Any]:
    return {"reset": reset_timeout, "step": step_timeout, "reset_inplace": reset_inplace}


def _serve(
    pipes: tuple[Any, Any], env_fn_wrapper: Any, buffer: Any, method_names: Sequence[str], settings: Mapping[str, Any]
) -> None:
    """Run the requests of a pipe. The settings have limits, in seconds by method; `worker_fn` has none, and calls the env's own `render`."""
    limit_threads(1)
    env = env_fn_wrapper.data()
    parent, pipe = pipes
    parent.close()

    def store(obs: Any) -> Any:
        if buffer is None:
            return obs
        buffer.fill(obs)
        return None

    def run(name: str, args: Any, kwargs: Any) -> Any:
        if name == "getattr":
            return getattr(env, args[0])
        if name not in method_names:
            raise KeyError(f"not support env cmd: {name}")
        args, kwargs = args or (), kwargs or {}
        if name == "render" and "reset" in settings:
            return render_frame(env, kwargs.get("render_mode", "rgb_array"))
        with time_limit(settings.get(name), name):
            result = getattr(env, name)(*args, **kwargs)
            if name == "step" and not is_abnormal_timestep(result):
                if settings["reset_inplace"] and result.done:
                    result = result._replace(obs=env.reset())
                return result if buffer is None else result._replace(obs=store(result.obs))
            return store(result) if name == "reset" else result

    name = ""
    try:
        while name != "close":
            name, args, kwargs = pipe.recv()
            try:
                reply = run(name, args, kwargs)
            except Exception as exc:
                logger.warning("the env's process raised:\n%s", traceback.format_exc())
                reply = _portable_error(exc)
            pipe.send(reply)
    except (EOFError, KeyboardInterrupt):
        pass  # the manager has ended, or ends with this process
    finally:
        pipe.close()


def _portable_error(exc: Exception) -> Exception:
    """Return an exception of the same class with the traceback as its text; a RuntimeError if that class cannot be pickled so."""
    text = "\nEnv Process Exception:\n" + "".join(traceback.format_tb(exc.__traceback__)) + repr(exc)
    try:
        made = type(exc)(text)
        pickle.loads(pickle.dumps(made))
    except Exception:  # constructors and pickles of other people's classes may raise anything
        return RuntimeError(text)
    return made
