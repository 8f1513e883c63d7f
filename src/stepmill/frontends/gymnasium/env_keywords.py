"""Constructor arguments of the envs in Gymnasium and ale-py, so that type checkers can tell them from misspelt options.

These classes have no effect at run time: `make_vec` passes every keyword that is not its own to the env's constructor.
"""

from __future__ import annotations

from typing import Any, TypedDict


class ClassicKeywords(TypedDict, total=False):
    """Arguments of the envs in classic_control, toy_text and box2d."""

    continuous: Any
    desc: Any
    domain_randomize: Any
    enable_wind: Any
    fickle_passenger: Any
    fickle_probability: Any
    g: Any
    goal_velocity: Any
    gravity: Any
    hardcore: Any
    is_rainy: Any
    is_slippery: Any
    lap_complete_percent: Any
    map_name: Any
    natural: Any
    rainy_probability: Any
    reward_schedule: Any
    sab: Any
    success_rate: Any
    sutton_barto_reward: Any
    turbulence_power: Any
    verbose: Any
    wind_power: Any


class MujocoKeywords(TypedDict, total=False):
    """Arguments of the envs in mujoco, and of their base class."""

    camera_id: Any
    camera_name: Any
    contact_cost_range: Any
    contact_cost_weight: Any
    contact_force_range: Any
    ctrl_cost_weight: Any
    default_camera_config: Any
    exclude_current_positions_from_observation: Any
    forward_reward_weight: Any
    frame_skip: Any
    healthy_angle_range: Any
    healthy_reward: Any
    healthy_state_range: Any
    healthy_z_range: Any
    height: Any
    impact_cost_range: Any
    impact_cost_weight: Any
    include_cfrc_ext_in_observation: Any
    include_cinert_in_observation: Any
    include_cvel_in_observation: Any
    include_qfrc_actuator_in_observation: Any
    main_body: Any
    max_geom: Any
    reset_noise_scale: Any
    reward_control_weight: Any
    reward_dist_weight: Any
    reward_near_weight: Any
    terminate_when_unhealthy: Any
    uph_cost_weight: Any
    use_contact_forces: Any
    visual_options: Any
    width: Any
    xml_file: Any


class AtariKeywords(TypedDict, total=False):
    """Arguments of ale-py's AtariEnv."""

    continuous_action_threshold: Any
    difficulty: Any
    frameskip: Any
    full_action_space: Any
    game: Any
    max_num_frames_per_episode: Any
    mode: Any
    obs_type: Any
    repeat_action_probability: Any
    sound_obs: Any


class EnvKeywords(ClassicKeywords, MujocoKeywords, AtariKeywords, total=False):
    """All of these arguments, and those of `gymnasium.make` for every env."""

    max_episode_steps: int | None
    disable_env_checker: bool | None
    render_mode: str | None
