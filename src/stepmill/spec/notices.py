"""Warnings that name the user's line: the place that called stepmill, not a line of stepmill's own."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Modules that call functions of stepmill on its behalf: their frames are not the user's either.
_CALLING_MODULES = ("contextlib", "threading", "weakref")


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, and blame the innermost line of code outside stepmill.

    A warning from a thread of stepmill's own, which no code of the user has called, is blamed on "<stepmill>".
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
