"""Makes the OpenGL context of a MuJoCo renderer of Gymnasium current before the renderer draws.

Gymnasium's viewers make their context current when they are made. If a process has several envs, the newest viewer's context is
current, and the others draw their scenes with its textures and meshes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_MODULE = "gymnasium.envs.mujoco.mujoco_rendering"
_MARK = "_stepmill_makes_current"


def make_contexts_current() -> None:
    """Change the viewers of Gymnasium's MuJoCo envs in this process, once, if their module is imported."""
    module = sys.modules.get(_MODULE)
    for name in ("OffScreenViewer", "WindowViewer"):
        viewer = getattr(module, name, None)
        if viewer is not None and not hasattr(viewer.render, _MARK) and hasattr(viewer, "make_context_current"):
            viewer.render = _with_own_context(viewer.render)


def _with_own_context(render: Any) -> Any:
    @functools.wraps(render)
    def render_with_own_context(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.make_context_current()
        return render(self, *args, **kwargs)

    setattr(render_with_own_context, _MARK, True)
    return render_with_own_context
