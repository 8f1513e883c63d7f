"""Kernels: envs in compiled code, which the engine's own threads run without the GIL.

@stepmill.kernel(...)          an env in Python, which Numba compiles (`stepmill[numba]`)
stepmill.kernels.load(path)    an env in C, C++ or Rust, behind `stepmill_kernel.h`
stepmill.kernels.find(id)      a kernel that comes with stepmill

pool = stepmill.Pool([kernel] * 64, backend="kernel")
"""

from typing import TYPE_CHECKING

from stepmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from stepmill.kernels.catalog import find as find
    from stepmill.kernels.catalog import names as names
    from stepmill.kernels.library import LibraryKernel as LibraryKernel
    from stepmill.kernels.library import get_include as get_include
    from stepmill.kernels.library import load as load
    from stepmill.kernels.mujoco_task import MujocoKernel as MujocoKernel
    from stepmill.kernels.mujoco_task import MujocoTask as MujocoTask
    from stepmill.kernels.python import PythonKernel as PythonKernel
    from stepmill.kernels.python import kernel as kernel
    from stepmill.kernels.rng import Rng as Rng
    from stepmill.kernels.rng import seed_words as seed_words

__getattr__, __dir__, __all__ = lazy_names(__name__)
