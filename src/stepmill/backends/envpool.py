"""EnvPool pools: the envs are C++, and so are the threads that step them. Which calls those are, `stepmill.envs.envpool` knows."""

from __future__ import annotations

from stepmill.backends.foreign import ForeignBackend


class EnvPoolBackend(ForeignBackend):
    """One EnvPool pool. Its env functions are one `stepmill.envs.envpool.EnvPoolTask`, once per env."""
