"""Which backend "auto" is."""

from __future__ import annotations

import pytest

from stepmill.pool.auto_backend import auto_backend


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({"num_envs": 1}, "serial"),
        ({"num_envs": 8, "num_workers": 0}, "serial"),
        ({"num_envs": 2}, "process"),
        ({"num_envs": 512}, "process"),
        ({"num_envs": 16, "step_s": 8e-6}, "serial"),
        ({"num_envs": 18, "step_s": 8e-6}, "process"),
        ({"num_envs": 2, "step_s": 1e-3}, "process"),
        ({"num_envs": 64, "step_s": 1e-7}, "serial"),
    ],
)
def test_auto_is_serial_if_it_is_known_to_be_faster(arguments, backend):
    assert auto_backend(**arguments) == backend
