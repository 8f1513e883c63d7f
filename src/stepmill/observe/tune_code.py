"""The program that `stepmill tune` prints: it makes envs in the configuration that was chosen."""

from __future__ import annotations

from stepmill.observe.catalog import FRAME_SKIP, SCREEN_SIZE_PX, STACK_SIZE, EnvChoice
from stepmill.observe.tune_choice import Configuration

_PREPROCESSING = f"""
def preprocess(env):
    env = AtariPreprocessing(env, frame_skip={FRAME_SKIP}, screen_size={SCREEN_SIZE_PX}, grayscale_obs=True)
    return FrameStackObservation(env, {STACK_SIZE})

"""


def code_text(choice: EnvChoice, configuration: Configuration, num_envs: int) -> str:
    """Return a program of a few lines that makes the envs."""
    is_in_step = configuration.batch_size is None
    options = "".join(f", {name}={value!r}" for name, value in configuration.keywords().items()).replace("'", '"')
    options = options if is_in_step else f", batch_size={configuration.batch_size}{options}"
    count = f"({num_envs} + {configuration.spare_envs})" if configuration.spare_envs else str(num_envs)
    kwargs: dict[str, object] = {**dict(choice.env_kwargs), **({"frameskip": 1} if choice.is_atari else {})}
    arguments = "".join(f", {name}={value!r}" for name, value in kwargs.items())
    imports, body = ["import stepmill"], [""]
    if choice.is_atari:
        imports.insert(0, "from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation")
        body += _PREPROCESSING.split("\n")
    if choice.is_function:
        name = choice.env_id.rpartition(":")[2]
        make = name if name.isidentifier() else "make_env"
        imports += [f"from {choice.module} import {make}"] if choice.module else []
        make = f"lambda: {make}({arguments[2:]})" if arguments else make
    else:
        known_id = f"{choice.module}:{choice.env_id}" if choice.module else choice.env_id
        make = f'gymnasium.make("{known_id}", disable_env_checker=True{arguments})'
        make = f"lambda: preprocess({make})" if choice.is_atari else f"lambda: {make}"
    if not is_in_step:
        imports = imports if choice.is_function else ["import gymnasium", *imports]
        call = f"pool = stepmill.Pool([{make}] * {count}{options})"
    elif choice.is_function:
        call = f"envs = stepmill.VectorEnv([{make}] * {count}{options})"
    else:
        wrappers = (f", env_kwargs={kwargs!r}" if kwargs else "") + ", wrappers=[preprocess]" * choice.is_atari
        call = f'envs = stepmill.make_vec("{known_id}", num_envs={num_envs}{wrappers}{options})'
    return "\n".join([*imports, *body, call])
