"""As much of ALF's names as stepmill looks for, so that what it does beside ALF can be tested without it."""

registered = []
_device = "cpu"


def configurable(cls):
    registered.append(cls)
    return cls


def set_default_device(device):
    global _device
    _device = device


def get_default_device():
    return _device
