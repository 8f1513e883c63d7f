"""stepmill's front-end beside the real actorcritic; `make test-originals` runs these."""

import contextlib

with contextlib.suppress(ImportError):
    import gym  # type: ignore[import-not-found]  # noqa: F401 - before ours: then SubprocessEnv is one of its envs
