"""Learns CartPole on two nodes of a Ray cluster: rollouts near the envs, a linear policy, NumPy only.

    python examples/ray_cartpole.py [--nodes 2] [--rounds 40] [--address ADDRESS] [--curve FILE.csv]

Each node runs 8 envs and the newest policy that it has. The program gets one fragment of 64 steps per node, makes a step of REINFORCE
with a baseline, and sends the policy back. It ends with an assertion: episodes have become longer. Without an address, a cluster
of two machines is simulated on this one.
"""

from __future__ import annotations

import argparse
from functools import partial

import gymnasium
import numpy as np
from numpy.typing import NDArray

import stepmill
from stepmill.frontends.ray_rollout import RayRollout, joined

NUM_STEPS, ENVS_PER_NODE, GAMMA, RATE = 64, 8, 0.98, 0.05
SCALE = np.array([0.5, 1.0, 0.1, 1.0])


class LinearPolicy:
    """Chooses action 1 with the probability sigmoid(w · obs). It is pickled and runs on the nodes."""

    def __init__(self, weights: NDArray[np.float64], seed: int) -> None:
        self.weights = weights
        self.rng = np.random.default_rng(seed)

    def __call__(self, obs: NDArray[np.float32], env_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        chance = 1.0 / (1.0 + np.exp(-features(obs) @ self.weights))
        return (self.rng.random(len(obs)) < chance).astype(np.int64)


def features(obs: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.asarray(obs / SCALE, np.float64)


def gradient(batch: stepmill.RolloutBatch, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the policy gradient of a batch [T, N], with the mean return of each step as baseline."""
    returns = np.zeros_like(batch.reward, dtype=np.float64)
    later = np.zeros(batch.reward.shape[1])
    for t in reversed(range(len(returns))):
        later = batch.reward[t] + GAMMA * later * ~(batch.terminated[t] | batch.truncated[t])
        returns[t] = later
    advantages = (returns - returns[batch.valid].mean()) / (returns[batch.valid].std() + 1e-8) * batch.valid
    inputs = features(batch.obs[:-1])
    surprise = batch.action - 1.0 / (1.0 + np.exp(-inputs @ weights))
    step: NDArray[np.float64] = np.einsum("tn,tn,tnf->f", advantages, surprise, inputs) / batch.valid.sum()
    return step


def train(num_nodes: int, num_rounds: int, nodes: stepmill.RayOptions) -> list[float]:
    """Return the mean length of the episodes that ended in each round."""
    weights, lengths = np.zeros(4), []
    env_fns = [partial(gymnasium.make, "CartPole-v1")] * (num_nodes * ENVS_PER_NODE)
    policy = LinearPolicy(weights, seed=0)
    with RayRollout(
        env_fns, NUM_STEPS, policy=policy, seed=1, nodes=nodes, num_workers=1, on_fault="truncate"
    ) as rollout:
        for number in range(num_rounds):
            fragments = rollout.collect(timeout_s=120)
            batch = joined(fragments)
            weights = weights + RATE * 10 * gradient(batch, weights)
            rollout.set_policy(LinearPolicy(weights, seed=number + 1))
            lengths.append(float(np.mean([episode["l"] for episode in batch.episodes] or [NUM_STEPS])))
            versions = [fragment.version for fragment in fragments]
            print(f"round {number}: mean episode length {lengths[-1]:.0f}, versions of the policy {versions}")
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--address", default=None)
    parser.add_argument("--curve", help="write rounds and mean lengths to this CSV file")
    given = parser.parse_args()
    import ray

    cluster = None
    if given.address is None:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        cluster.add_node(num_cpus=2)
    ray.init(address=given.address or cluster.address, log_to_driver=False)
    try:
        nodes = stepmill.RayOptions(num_nodes=given.nodes)
        lengths = train(given.nodes, given.rounds, nodes)
    finally:
        if cluster is not None:
            ray.shutdown()
            cluster.shutdown()
    if given.curve:
        rows = list(enumerate(lengths, 1))
        np.savetxt(given.curve, rows, "%.6g", ",", header="round,mean length of episodes", comments="")
    assert np.mean(lengths[-5:]) > 1.3 * np.mean(lengths[:3]), "episodes have not become longer"


if __name__ == "__main__":
    main()
