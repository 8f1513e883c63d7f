"""A fault of a kernel is that of one env, and says what happened."""

from __future__ import annotations

import numpy as np
import pytest

import stepmill

pytest.importorskip("numba")

from tests.harness.pools import begun
from tests.harness.scripts import start_script
from tests.kernels.kernels import faulty


@pytest.mark.parametrize(
    ("action", "text"),
    [(1, "ZeroDivisionError"), (2, r"ValueError.*no such move \(kernels.py line \d+"), (3, "IndexError")],
)
def test_what_compiled_code_raises_is_an_error_of_its_env(action: int, text: str) -> None:
    with begun(stepmill.Pool([faulty] * 3, backend="kernel", num_workers=2)) as pool:
        pool.send(np.array([0, action, 0]))
        with pytest.raises(stepmill.EnvError, match=f"env 1 raised {text}") as raised:
            pool.recv(3)
        assert raised.value.env_id == 1
        assert pool.recv(2).env_id.tolist() == [0, 2]
        assert pool.reset(env_ids=[1]).env_id.tolist() == [1]
        assert pool.step(np.zeros(3, np.int64)).obs[:, 0].tolist() == [2.0, 1.0, 2.0]


def test_a_kernel_raises_in_python_what_it_raises_compiled() -> None:
    env = begun(faulty(compiled=False))
    with pytest.raises(ValueError, match="no such move"):
        env.step(2)


_ENDLESS = """
import numpy as np
import stepmill
from tests.kernels.kernels import endless

pool = stepmill.Pool([endless] * 4, backend="kernel", num_workers=2, step_timeout_s=0.2)
pool.reset()
pool.step(np.zeros(4, np.int64))
pool.step(np.array([0, 0, 4, 0]))
"""


def test_an_env_that_does_not_come_back_is_named() -> None:
    with start_script(_ENDLESS, interpreter=()) as run:
        line = run.stderr.readline()
        run.kill()
    assert "env 2 of the kernel endless has not returned" in line
