"""Warnings that point to the user's line that called stepmill, not to a line of stepmill."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Modules that call functions of stepmill on its behalf. Their frames are not user code either.
_CALLING_MODULES = ("contextlib", "gymnasium.vector.vector_env", "threading", "weakref")


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning that points to the innermost line of code outside stepmill.

    In a thread that stepmill started there is no such line; the warning then points to "<stepmill>".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame):
        frame = frame.f_back
    if frame is None:
        warnings.warn_explicit(message, category, "<stepmill>", 1, module="stepmill")
        return
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__", "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def _is_internal(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE_DIR) or frame.f_globals.get("__name__") in _CALLING_MODULES
