"""TorchRL warns of its own deprecations while it is imported; here that happens once, before the tests' filters count."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.collectors
    import torchrl.envs  # noqa: F401
