"""The front-end for Gymnasium: `VectorEnv` and `make_vec`, in place of Gymnasium's own.

vector         `VectorEnv`, a gymnasium.vector.VectorEnv on top of `Pool`
make           `make_vec`
arguments      checks of the arguments of `VectorEnv` and of its `reset`
spaces         the spaces of many envs as the spaces of one vector env
errors         errors that are both stepmill's and Gymnasium's
"""

from stepmill.frontends.gymnasium.make import make_vec
from stepmill.frontends.gymnasium.vector import VectorEnv

__all__ = ["VectorEnv", "make_vec"]
