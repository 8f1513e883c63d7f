"""Gymnasium's spaces, made of the plain data to which `other_side.describe_space` has turned those of the simulator."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from gymnasium import spaces

_ARGUMENTS = {"feature_space": "space", "character_set": "charset"}  # of attributes that have other names


def make_space(described: Any) -> Any:
    """Return a space, or None for None."""
    if described is None:
        return None
    name, attributes = described
    arguments = {_ARGUMENTS.get(key, key): value for key, value in attributes.items()} | {"sort_keys": False}
    for key in ("space", "node_space", "edge_space"):
        if key in arguments:
            arguments[key] = make_space(arguments[key])
    if name == "Dict":
        arguments["spaces"] = [(key, make_space(each)) for key, each in arguments["spaces"]]
    elif "spaces" in arguments:
        arguments["spaces"] = [make_space(each) for each in arguments["spaces"]]
    if "charset" in arguments:
        arguments["charset"] = frozenset(arguments["charset"])
    if "dtype" in arguments:
        arguments["dtype"] = np.dtype(arguments["dtype"]).type
    if arguments.get("start", ()) is None:
        del arguments["start"]  # gym before 0.22 has none
    make = getattr(spaces, name)
    known = inspect.signature(make).parameters  # older versions of Gymnasium lack some
    return make(**{key: value for key, value in arguments.items() if key in known})
