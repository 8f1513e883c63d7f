"""Imports TorchRL once, before the tests' warning filters apply: it warns of its own deprecations."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.collectors  # noqa: F401
    import torchrl.envs  # noqa: F401
