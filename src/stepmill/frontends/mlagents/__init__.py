"""stepmill for Unity ML-Agents: managers of many envs that replace those of ML-Agents.

The names are loaded on first use, because a worker also imports this package.

    manager              `EnvManager`, whose methods trainers call; `SimpleEnvManager` for one env in this process; specs of
                         behaviours as trainers of the first generation describe them
    subprocess_manager   `SubprocessEnvManager`
    engine_workers       drives workers in stepmill's engine, which is the default: commands, failures, restarts
    unity_worker         the env and side channels in such a worker's process
    pipe_workers         drives workers that a subclass starts; `worker()` for their processes
    workers              the state of a worker, its restart quota, its agents; messages
    steps                results, actions, batches of agents
    channels             side channels and their bytes
    settings             engine settings, restart quotas, parameters of the env
    timing               timers of the learner and the workers
    failures             exceptions of an env, and ML-Agents' classes for them; the only import of mlagents_envs
"""

from typing import TYPE_CHECKING

from stepmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from stepmill.envs.unity import ActionTuple as ActionTuple
    from stepmill.frontends.mlagents.channels import EngineConfig as EngineConfig
    from stepmill.frontends.mlagents.channels import EngineConfigurationChannel as EngineConfigurationChannel
    from stepmill.frontends.mlagents.channels import EnvironmentParametersChannel as EnvironmentParametersChannel
    from stepmill.frontends.mlagents.channels import FloatPropertiesChannel as FloatPropertiesChannel
    from stepmill.frontends.mlagents.channels import IncomingMessage as IncomingMessage
    from stepmill.frontends.mlagents.channels import OutgoingMessage as OutgoingMessage
    from stepmill.frontends.mlagents.channels import RawBytesChannel as RawBytesChannel
    from stepmill.frontends.mlagents.channels import SideChannel as SideChannel
    from stepmill.frontends.mlagents.channels import StatsAggregationMethod as StatsAggregationMethod
    from stepmill.frontends.mlagents.channels import StatsSideChannel as StatsSideChannel
    from stepmill.frontends.mlagents.channels import aggregate_stats as aggregate_stats
    from stepmill.frontends.mlagents.failures import UnityCommunicationException as UnityCommunicationException
    from stepmill.frontends.mlagents.failures import (
        UnityCommunicatorStoppedException as UnityCommunicatorStoppedException,
    )
    from stepmill.frontends.mlagents.failures import UnityEnvironmentException as UnityEnvironmentException
    from stepmill.frontends.mlagents.failures import UnityException as UnityException
    from stepmill.frontends.mlagents.failures import UnitySideChannelException as UnitySideChannelException
    from stepmill.frontends.mlagents.failures import UnityTimeOutException as UnityTimeOutException
    from stepmill.frontends.mlagents.manager import BrainParameters as BrainParameters
    from stepmill.frontends.mlagents.manager import CameraResolution as CameraResolution
    from stepmill.frontends.mlagents.manager import EnvManager as EnvManager
    from stepmill.frontends.mlagents.manager import SimpleEnvManager as SimpleEnvManager
    from stepmill.frontends.mlagents.pipe_workers import worker as worker
    from stepmill.frontends.mlagents.settings import ConstantSettings as ConstantSettings
    from stepmill.frontends.mlagents.settings import GaussianSettings as GaussianSettings
    from stepmill.frontends.mlagents.settings import ManagerOptions as ManagerOptions
    from stepmill.frontends.mlagents.settings import MultiRangeUniformSettings as MultiRangeUniformSettings
    from stepmill.frontends.mlagents.settings import OnCrash as OnCrash
    from stepmill.frontends.mlagents.settings import RestartLimits as RestartLimits
    from stepmill.frontends.mlagents.settings import UniformSettings as UniformSettings
    from stepmill.frontends.mlagents.steps import ActionInfo as ActionInfo
    from stepmill.frontends.mlagents.steps import AllStepResult as AllStepResult
    from stepmill.frontends.mlagents.steps import BatchedStepResult as BatchedStepResult
    from stepmill.frontends.mlagents.steps import DecisionSteps as DecisionSteps
    from stepmill.frontends.mlagents.steps import EnvironmentStep as EnvironmentStep
    from stepmill.frontends.mlagents.steps import TerminalSteps as TerminalSteps
    from stepmill.frontends.mlagents.steps import join_steps as join_steps
    from stepmill.frontends.mlagents.steps import split_info as split_info
    from stepmill.frontends.mlagents.subprocess_manager import SubprocessEnvManager as SubprocessEnvManager
    from stepmill.frontends.mlagents.workers import EnvironmentCommand as EnvironmentCommand
    from stepmill.frontends.mlagents.workers import EnvironmentRequest as EnvironmentRequest
    from stepmill.frontends.mlagents.workers import EnvironmentResponse as EnvironmentResponse
    from stepmill.frontends.mlagents.workers import StepResponse as StepResponse
    from stepmill.frontends.mlagents.workers import UnityEnvWorker as UnityEnvWorker

__getattr__, __dir__, __all__ = lazy_names(__name__)
