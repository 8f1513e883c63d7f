"""Envs of the tests of `stepmill.foreign`. They need NumPy only, so that a Python without site-packages can make them."""

import os
import signal
import sys
import time

import numpy as np


class Walk:
    """An env with Gymnasium's methods and no spaces. An action that is the name of a fault has that fault."""

    def __init__(self, length=10, start=None):
        self.length = length
        self.start = np.zeros(3, np.float32) if start is None else start
        self.speed = 1.0
        self.engine = {"parts": [object()]}
        self.position = self.start
        self.marks = []

    def reset(self, *, seed=None, options=None):
        self.random = np.random.RandomState(seed)
        self.position = self.start.copy()
        return self.position, {"seed": seed, "options": options}

    def step(self, action):
        info = {}
        if isinstance(action, str):
            info = getattr(self, action)() or {}
        self.position = self.position + np.float32(self.speed * self.random.rand())
        return self.position, np.float32(self.position[0]), len(self.marks) > 99, self.position[0] > self.length, info

    def move(self):
        """No fault."""

    def fail(self):
        raise KeyError("a deliberate failure")

    def die(self):
        sys.stderr.write("the last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        os._exit(7)

    def hang(self):
        time.sleep(600)

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def print_much(self):
        print("x" * 10_000_000)

    def fork(self):
        if os.fork() == 0:
            return {}  # the copy comes back, too
        return None

    def fork_for_ever(self):
        if os.fork() == 0:
            time.sleep(600)

    def tell_engine(self):
        return {"state": {"engine": self.engine}}

    def tell_much(self):
        return {
            "picture": np.arange(10**6).reshape(1000, 1000),
            3: (1, [2.5, None]),
            "kind": np.float64(2.5),
            "set": {1},
        }

    def mark(self, value, times=1):
        self.marks += [value] * times
        return list(self.marks)

    def pid(self):
        return os.getpid()

    def render(self):
        return np.full((64, 48, 3), len(self.marks), np.uint8)

    def close(self):
        pass


class OldWalk:
    """The same with the methods of old gym."""

    def __init__(self):
        self.count = 0
        self.seeds = []

    def seed(self, seed=None):
        self.seeds.append(seed)

    def reset(self):
        self.count = 0
        return np.zeros(2)

    def step(self, action):
        self.count += 1
        info = {"TimeLimit.truncated": True} if action else {}
        return np.full(2, self.count), self.count, self.count == 2, info

    def render(self, mode="human"):
        return np.zeros((2, 2, 3), np.uint8) if mode == "rgb_array" else None


def fail():
    raise ValueError("no such level")


def wait():
    time.sleep(600)


class Image:
    """Returns pictures of 84x84x4, after `busy_s` seconds of work."""

    def __init__(self, busy_s=0.0):
        self.busy_s = busy_s
        self.picture = np.zeros((84, 84, 4), np.uint8)

    def reset(self, seed=None, options=None):
        return self.picture, {}

    def step(self, action):
        end = time.perf_counter() + self.busy_s
        while time.perf_counter() < end:
            pass
        self.picture[0, 0, 0] ^= 1
        return self.picture, 0.0, False, False, {}


class Picture(Image):
    """The same with spaces, which are larger than a message holds."""

    def __init__(self):
        from gymnasium import spaces

        super().__init__()
        self.observation_space = spaces.Box(np.arange(84 * 84 * 4).reshape(84, 84, 4) % 3, 255, dtype=np.uint8)
        self.action_space = spaces.Discrete(2)


class Nothing:
    """Does nothing in a step."""

    def __init__(self):
        self.observation = np.zeros(4, np.float32)

    def reset(self, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        return self.observation, 0.0, False, False, {}
