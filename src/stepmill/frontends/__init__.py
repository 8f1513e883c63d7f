"""Front-ends on top of `Pool`: one module or package for each library in which learners are written.

gymnasium      `VectorEnv` and `make_vec`
alf            ALF's parallel and process environments
di_engine      DI-engine's env managers and `EnvSupervisor`
dm_env         `DmEnvironment`
mlagents       Unity ML-Agents' env managers
multi_env      actorcritic's `MultiEnv` and `SubprocessEnv`
pettingzoo     `StepmillParallelEnv` and `AgentVectorEnv`
sb3            Stable-Baselines3's `VecEnv`
tianshou       Tianshou's vector env
torchrl        TorchRL's envs
ray_rollout    `RayRollout`: rollouts on the machines of a Ray cluster
rollout        T steps of all envs in arrays, for any learner
batch_rows     rows of batches and actions, for the other modules
env_objects    the env objects of a pool, for the other modules
pool_options   options that a front-end sets itself, for the other modules
starting_pool  a pool whose processes start before it is made, for the other modules
overrides      refuses overridden methods that are never called, for the other modules
"""
