"""The policies that `stepmill run` can drive envs with: random actions, or a function that the user names.

A policy is a function of (obs, action_space) that returns the actions of one batch:

- `obs` is the batch's observation, arrays of shape [B, ...], in dicts and tuples where the env has them;
- `action_space` is Gymnasium's space of B actions at once (`batch_space`), seeded with `--seed`;
- the returned actions have the shape of `action_space.sample()`: integers [B] for Discrete, floats [B, ...] for Box.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from os import getcwd
from typing import TYPE_CHECKING, TypeAlias, cast

from stepmill.observe.catalog import import_user_module
from stepmill.spec.errors import UsageError

if TYPE_CHECKING:
    import gymnasium

Policy: TypeAlias = "Callable[[object, gymnasium.Space[object]], object]"


def act_randomly(_obs: object, action_space: gymnasium.Space[object]) -> object:
    """Return one sample of the action space."""
    return action_space.sample()


def load_policy(path: str) -> Policy:
    """Return the policy that `module:function` names.

    Raises:
        UsageError: there is no such function.
    """
    return cast("Policy", load_function("--policy", path, takes="(obs, action_space)"))


def load_function(option: str, path: str, *, takes: str = "()") -> Callable[..., object]:
    """Return the function that `module:function` names, for an option of the command line.

    Raises:
        UsageError: there is no such function.
    """
    found = load_object(option, path)
    if not callable(found):
        raise UsageError(f"{option} {path!r} is a {type(found).__name__}, not a function of {takes}")
    return found


def load_object(option: str, path: str) -> object:
    """Return what `module:name` names, for an option of the command line.

    The current directory is searched first, as `python` does for a script there.

    Raises:
        UsageError: there is no such object.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{option} {path!r} is not of the form module:function")
    if module.endswith(".py"):
        raise UsageError(f"{option} {path!r} names a file; drop the .py: {module.removesuffix('.py')}:{name}")
    search_current_directory()
    found: object = import_user_module(module, needed_by=f"{option} {path}")
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{option} {path!r}: module {module!r} has no {name!r}; give the name of a function in it")
        found = getattr(found, part)
    return found


def search_current_directory() -> None:
    """Add the current directory to `sys.path`: the installed command, unlike `python -m`, does not search it."""
    here = getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
