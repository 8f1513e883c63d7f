"""The front-end for Gymnasium: `VectorEnv` and `make_vec`, which replace Gymnasium's own.

vector         `VectorEnv`, a gymnasium.vector.VectorEnv on top of `Pool`
make           `make_vec`; `install_vector_entry_points`, for programs that call `gymnasium.make_vec`
arguments      checks of the arguments of `VectorEnv` and of its `reset`
spaces         the spaces of many envs as the spaces of one vector env
errors         errors that are both stepmill's and Gymnasium's
"""

import gymnasium

try:
    from gymnasium.vector import AutoresetMode as _AutoresetMode  # noqa: F401  new in 1.1
except ImportError as exc:
    raise ImportError(f"stepmill needs gymnasium>=1.1, but {gymnasium.__version__} is installed") from exc

from stepmill.frontends.gymnasium.make import VectorEntryPoints, install_vector_entry_points, make_vec
from stepmill.frontends.gymnasium.vector import VectorEnv

__all__ = ["VectorEntryPoints", "VectorEnv", "install_vector_entry_points", "make_vec"]
