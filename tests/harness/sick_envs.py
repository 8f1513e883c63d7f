"""Envs with one planted fault each, which `stepmill doctor` must find. The name of the class is the name of the check."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time

import gymnasium
import numpy as np

_SHARED = {"steps": 0}


class Healthy(gymnasium.Env):
    """Walks at random from its own generator; an episode takes 20 steps."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place = 0, 0.0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        self.place += float(self.np_random.normal()) * 0.1 + int(action)
        return self.observe(), self.place, False, self.t == 20, {}

    def observe(self):
        return np.array([self.place, self.t], np.float32)


class WrongBounds(Healthy):
    check = "observation-space"

    def observe(self):
        return super().observe() + 200


class Rounded(Healthy):
    """Observations are outside the space by a rounding error."""

    check = "observation-space"

    def observe(self):
        return np.full(2, np.nextafter(np.float32(100), np.float32(200)))


class WrongShape(Healthy):
    check = "observation-space"

    def observe(self):
        return np.zeros(3, np.float32)


class NanReward(Healthy):
    check = "bad-reward"

    def step(self, action):
        obs, _, *rest = super().step(action)
        return (obs, float("nan"), *rest)


class FourValues(Healthy):
    check = "bad-output"

    def step(self, action):
        return super().step(action)[:4]


class Aliasing(Healthy):
    check = "observation-aliases"

    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(2, np.float32)

    def observe(self):
        self.buffer[:] = self.place, self.t
        return self.buffer


class GlobalGenerator(Healthy):
    check = "global-generator"

    def step(self, action):
        self.place += random.random()
        return super().step(action)


class GlobalNumpyGenerator(Healthy):
    check = "global-generator"

    def reset(self, *, seed=None, options=None):
        np.random.rand()  # noqa: NPY002  the fault
        return super().reset(seed=seed)


class SharedState(Healthy):
    check = "shared-state"

    def reset(self, *, seed=None, options=None):
        _SHARED["steps"] = 0
        return super().reset(seed=seed)

    def step(self, action):
        _SHARED["steps"] += 1
        obs, _, *rest = super().step(action)
        return (obs, _SHARED["steps"], *rest)


class Clocked(Healthy):
    check = "non-deterministic"

    def step(self, action):
        obs, _, *rest = super().step(action)
        return (obs, time.monotonic(), *rest)


class Remembering(Healthy):
    check = "state-survives-reset"
    age = 0

    def step(self, action):
        self.age += 1
        obs, _, *rest = super().step(action)
        return (obs, self.age, *rest)


class Slow(Healthy):
    check = "few-steps"

    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


class Threaded(Healthy):
    check = "threads"

    def __init__(self):
        super().__init__()
        threading.Thread(target=self.compute, daemon=True).start()

    def compute(self):
        import hashlib

        block = b"x" * (1 << 20)
        while True:
            hashlib.sha256(block).digest()  # releases the GIL

    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


class HoldingGil(Healthy):
    check = "holds-gil"

    def step(self, action):
        ctypes.PyDLL(None).usleep(60_000)  # PyDLL keeps the GIL
        return super().step(action)


class HugeInfo(Healthy):
    check = "huge-info"

    def step(self, action):
        return (*super().step(action)[:4], {"image": np.zeros((200, 200, 3))})


class UnpicklableInfo(Healthy):
    check = "unpicklable-info"

    def step(self, action):
        return (*super().step(action)[:4], {"lock": threading.Lock()})


class SlowReset(Healthy):
    check = "slow-reset"

    def reset(self, *, seed=None, options=None):
        time.sleep(0.05)
        return super().reset(seed=seed)


class ForkUnsafe(Healthy):
    check = "fork-unsafe"
    owner = None

    def __init__(self):
        super().__init__()
        type(self).owner = type(self).owner or os.getpid()
        if type(self).owner != os.getpid():
            raise RuntimeError("this library was loaded before the fork")


class LeakingMemory(Healthy):
    check = "memory-leak"

    def __init__(self):
        super().__init__()
        self.log = []

    def step(self, action):
        self.log.append(bytearray(4000))
        return super().step(action)


class LeakingDescriptors(Healthy):
    check = "descriptor-leak"

    def reset(self, *, seed=None, options=None):
        self.files = [*getattr(self, "files", ()), os.open(os.devnull, os.O_RDONLY)]
        return super().reset(seed=seed)


class LeavingChildren(Healthy):
    check = "children-left"

    def __init__(self):
        super().__init__()
        self.child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


class Raising(Healthy):
    check = "raises"

    def step(self, action):
        raise ValueError("a deliberate failure")


class Crashing(Healthy):
    check = "crashes"

    def step(self, action):
        os.kill(os.getpid(), signal.SIGSEGV)


class Leaving(Healthy):
    check = "crashes"

    def step(self, action):
        os._exit(0)


class ChangingActions(Healthy):
    check = "changes-action"

    def __init__(self):
        super().__init__()
        self.action_space = gymnasium.spaces.Box(0, 2, (2,), np.float32)

    def step(self, action):
        action -= action.mean()
        return super().step(action[0] > 0)


class Hanging(Healthy):
    check = "hangs"

    def step(self, action):
        threading.Event().wait()


class Unspaced(gymnasium.Env):
    """Declares no spaces, so that doctor cannot draw actions."""


SICK = [each for each in Healthy.__subclasses__() if each.__module__ == __name__]
gymnasium.register("Sick-v0", NanReward)
gymnasium.register("Healthy-v0", Healthy)
gymnasium.register("Raising-v0", Raising)
gymnasium.register("Unspaced-v0", Unspaced, disable_env_checker=True)
