"""Step an env with an installed stepmill, on every backend. A freshly installed package must pass this."""

import numpy as np

import stepmill
from stepmill.spec.options import BackendName

NUM_ENVS = 4
NUM_STEPS = 50


def step_some(backend: BackendName) -> np.ndarray:
    """Return the observations of `NUM_STEPS` steps, [T, N, 4] float32."""
    envs = stepmill.make_vec("CartPole-v1", num_envs=NUM_ENVS, backend=backend, num_workers=2)
    try:
        envs.reset(seed=0)
        actions = np.arange(NUM_ENVS) % 2
        return np.stack([np.array(envs.step(actions)[0]) for _ in range(NUM_STEPS)])
    finally:
        envs.close()


def main() -> None:
    """Check that all backends return the same data."""
    serial = step_some(BackendName.SERIAL)
    for backend in (BackendName.THREAD, BackendName.PROCESS):
        if not np.array_equal(serial, step_some(backend)):
            raise SystemExit(
                f"stepmill {stepmill.__version__}: the {backend.value} backend differs from the serial one"
            )
    print(f"stepmill {stepmill.__version__} steps {NUM_ENVS} envs on the serial, thread and process backends")


if __name__ == "__main__":
    main()
