"""Tools to test an env, a backend or a front-end: toy envs, and checks that report what is wrong.

check    check_env, check_backend
vector   check_frontend
compare  strict comparison of nested data
envs     toy envs with predictable results
faulty   envs that fail on purpose
gates    envs that wait until a test lets them continue
sampled  an env of any space, with random data

Names are loaded on first use, because the toy envs need Gymnasium and not every importer has it.
"""

from typing import TYPE_CHECKING

from stepmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from stepmill.testing.check import CheckFailed as CheckFailed
    from stepmill.testing.check import check_backend as check_backend
    from stepmill.testing.check import check_env as check_env
    from stepmill.testing.envs import BatchedCountingEnv as BatchedCountingEnv
    from stepmill.testing.envs import CountingEnv as CountingEnv
    from stepmill.testing.envs import ImageEnv as ImageEnv
    from stepmill.testing.envs import SeedRecorder as SeedRecorder
    from stepmill.testing.envs import SlowEnv as SlowEnv
    from stepmill.testing.faulty import DyingEnv as DyingEnv
    from stepmill.testing.faulty import RaisingEnv as RaisingEnv
    from stepmill.testing.gates import Gate as Gate
    from stepmill.testing.gates import GateEnv as GateEnv
    from stepmill.testing.sampled import SampledEnv as SampledEnv
    from stepmill.testing.vector import check_frontend as check_frontend

__getattr__, __dir__, __all__ = lazy_names(__name__)
