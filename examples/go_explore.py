"""Go-Explore: return to a state that was seen before, and explore from there.

    python examples/go_explore.py [--rounds 60] [--game] [--curve FILE.csv]

The program explores MountainCar with random actions. It keeps one saved state for each cell of position and speed (`stepmill.save`), gives
the states of rarely seen cells to all envs (`stepmill.restore`), and goes on from there. The envs are a kernel, whose states are plain
memory. `--game` does the same with an Atari game, whose emulator copies itself.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import gymnasium
import numpy as np

import stepmill

NUM_ENVS, NUM_STEPS = 32, 20


def explore(pool: stepmill.Pool, cell_of: Any, state: Any, rounds: int, *, returns: bool) -> list[int]:
    """Return how many cells were seen after each round. Without `returns`, episodes just go on."""
    found = []
    rng = np.random.default_rng(0)
    archive: dict[Any, stepmill.SavedEnvs] = {}
    num_visits: dict[Any, int] = {}
    pool.reset(seed=0)
    for _ in range(rounds):
        action = rng.integers(0, pool.single_action_space.n, NUM_ENVS)  # type: ignore[attr-defined]
        for _ in range(NUM_STEPS):
            change = rng.random(NUM_ENVS) < 0.1
            action[change] = rng.integers(0, pool.single_action_space.n, change.sum())  # type: ignore[attr-defined]
            batch = pool.step(action)
        over = batch.terminated | batch.truncated
        for env_id, cell in enumerate(map(cell_of, batch.obs)):
            num_visits[cell] = num_visits.get(cell, 0) + 1
            if cell not in archive and not over[env_id]:
                archive[cell] = stepmill.save(pool, None, env_ids=[env_id], state=state)
        found.append(len(num_visits))
        if not returns or not archive:
            continue
        cells = list(archive)
        weights = np.array([1 / (1 + num_visits[cell]) for cell in cells])
        for env_id, chosen in enumerate(rng.choice(len(cells), NUM_ENVS, p=weights / weights.sum())):
            stepmill.restore(pool, archive[cells[chosen]], env_ids=[env_id], state=state)
    return found


def cell_of_car(obs: Any) -> tuple[int, int]:
    return int(obs[0] * 20), int(obs[1] * 200)


def cell_of_screen(obs: Any) -> bytes:
    """A small picture in few shades of grey, as in the paper (Ecoffet et al., "First return, then explore", 2021)."""
    grey = obs.mean(2)[:208, :160].reshape(8, 26, 10, 16).mean((1, 3))
    return (grey // 32).astype(np.uint8).tobytes()


def copy_emulator(env: Any) -> Any:
    return env.unwrapped.ale.cloneState(include_rng=True)


def set_emulator(env: Any, state: Any) -> None:
    env.unwrapped.ale.restoreState(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--game", action="store_true", help="an Atari game in place of MountainCar")
    parser.add_argument("--curve", help="write env-steps, and the cells that were seen in both ways, to this CSV file")
    args = parser.parse_args()
    if args.game:
        import ale_py

        gymnasium.register_envs(ale_py)
        make, cell_of, state = partial(gymnasium.make, "ALE/Venture-v5"), cell_of_screen, (copy_emulator, set_emulator)
        options: dict[str, Any] = {"backend": "serial"}
    else:
        make, cell_of, state, options = (
            stepmill.kernels.find("MountainCar-v0"),
            cell_of_car,
            None,
            {"backend": "kernel"},
        )
    found = {}
    for returns in (False, True):
        with stepmill.Pool([make] * NUM_ENVS, **options) as pool:
            found[returns] = explore(pool, cell_of, state, args.rounds, returns=returns)
    print(f"random actions: {found[False][-1]} cells; from states that were seen before: {found[True][-1]} cells")
    if args.curve:
        steps = np.arange(1, args.rounds + 1) * NUM_STEPS * NUM_ENVS
        rows = np.stack([steps, found[False], found[True]], 1)
        np.savetxt(
            args.curve, rows, "%d", ",", header="env-steps,cells by random actions,cells by returning", comments=""
        )
    assert found[True][-1] > found[False][-1] or args.rounds < 20


if __name__ == "__main__":
    main()
