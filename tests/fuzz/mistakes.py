"""Calls that must be refused and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stepmill

MISTAKES: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("send([0.5] * 99)", lambda pool: pool.send([0.5] * 99)),
    ("send([0], [pool.num_envs])", lambda pool: pool.send([0], [pool.num_envs])),
    ("send([0, 0], [0, 0])", lambda pool: pool.send([0, 0], [0, 0])),
    ("send('left')", lambda pool: pool.send("left")),
    ("recv(0)", lambda pool: pool.recv(0)),
    ("recv(99)", lambda pool: pool.recv(99)),
    ("recv(timeout_s=-1)", lambda pool: pool.recv(timeout_s=-1)),
    ("recv(1, env_ids=[0])", lambda pool: pool.recv(1, env_ids=[0])),
    ("recv(env_ids=[99])", lambda pool: pool.recv(env_ids=[99])),
    ("reset(env_ids=[99])", lambda pool: pool.reset(env_ids=[99])),
    ("reset(seed=-1)", lambda pool: pool.reset(seed=-1)),
    ("reset(seed=[1] * 99)", lambda pool: pool.reset(seed=[1] * 99)),
    ("reset(options=[{}] * 99)", lambda pool: pool.reset(options=[{}] * 99)),
    ("set_attr('level', [1] * 99)", lambda pool: pool.set_attr("level", [1] * 99)),
    ("restore('here')", lambda pool: stepmill.restore(pool, "here")),
    ("revive([99])", lambda pool: pool.revive([99])),
    ("get_attr('level', env_ids=[-99])", lambda pool: pool.get_attr("level", env_ids=[-99])),
    ("properties.get('nothing', env_ids=[99])", lambda pool: pool.properties.get("nothing", env_ids=[99])),
)
