"""`options_of`: the options of a front-end's pool, some of which the front-end sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from stepmill.spec.errors import UsageError
from stepmill.spec.option_values import plain
from stepmill.spec.options import PoolOptions, merge_options
from stepmill.spec.records import changed


def options_of(
    user: str,
    options: PoolOptions | None,
    keywords: Mapping[str, object],
    fixed: Mapping[str, object],
    **defaults: object,
) -> PoolOptions:
    """Return the options of a pool that a front-end makes: as `merge_options`, with options that the front-end chooses.

    Args:
        user: the name of the front-end's class or function, for errors.
        fixed: the values of those that it chooses.
    Raises:
        UsageError: the user gives another value for one of `fixed`; see also `merge_options`.
    """
    given = merge_options(options, keywords, **defaults)
    chosen = replace(given, **cast("Any", fixed))
    for name in fixed.keys() & {*changed(given), *keywords}:
        value, own = plain(getattr(given, name)), plain(getattr(chosen, name))
        if value not in (None, own):
            raise UsageError(f"{user} needs {name}={own!r}, which is set for you; leave out {name}={value!r}")
    return chosen
