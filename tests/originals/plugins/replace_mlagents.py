"""A pytest plugin: replaces ML-Agents' SubprocessEnvManager, its workers and its messages with stepmill's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlagents.trainers import env_manager, subprocess_env_manager
from mlagents.trainers.torch_entities.model_serialization import ModelSerializer

from stepmill.frontends import mlagents


def write_empty_model(self: Any, path: str) -> None:
    """Replaces the export to ONNX, whose packages do not exist for the NumPy and the protobuf of mlagents 1.1.0."""
    Path(f"{path}.onnx").touch()


for name in (
    "EnvironmentCommand",
    "EnvironmentRequest",
    "EnvironmentResponse",
    "StepResponse",
    "SubprocessEnvManager",
    "UnityEnvWorker",
    "worker",
):
    setattr(subprocess_env_manager, name, getattr(mlagents, name))
env_manager.EnvironmentStep = mlagents.EnvironmentStep
ModelSerializer.export_policy_model = write_empty_model
