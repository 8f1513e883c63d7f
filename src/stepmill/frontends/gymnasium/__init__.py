"""stepmill for Gymnasium: `VectorEnv` and `make_vec`, in the place of Gymnasium's own."""

from stepmill.frontends.gymnasium.make import make_vec
from stepmill.frontends.gymnasium.vector import VectorEnv

__all__ = ["VectorEnv", "make_vec"]
