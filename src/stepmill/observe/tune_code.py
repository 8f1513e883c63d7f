"""The program that `stepmill tune` prints: it makes envs in the configuration that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepmill.observe.catalog import ATARI_MODULE, FRAME_SKIP, SCREEN_SIZE_PX, STACK_SIZE, EnvChoice
from stepmill.observe.tune_choice import Configuration
from stepmill.spec.options import BackendName

_PREPROCESSING = f"""def preprocess(env):
    env = AtariPreprocessing(env, frame_skip={FRAME_SKIP}, screen_size={SCREEN_SIZE_PX}, grayscale_obs=True)
    return FrameStackObservation(env, {STACK_SIZE})
"""


@dataclass(frozen=True)
class CodeSource:
    """How a program makes the env.

    Attributes:
        id: the id that `make_vec` knows; None for a function.
        function: the name of the function that makes the env, if there is no id.
        module: the module from which the program imports that function; empty if the program defines it.
        env_kwargs: arguments of the env's constructor.
        is_atari: whether the env gets the Atari preprocessing.
    """

    id: str | None = None
    function: str = ""
    module: str = ""
    env_kwargs: tuple[tuple[str, object], ...] = ()
    is_atari: bool = False


def code_of_id(given_id: str, choice: EnvChoice) -> CodeSource:
    """Return how a program makes the env of an id, with the module that registers it."""
    module, _, name = given_id.rpartition(":")
    if choice.is_function:
        return CodeSource(function=name, module=module, env_kwargs=choice.env_kwargs)
    module = module or (ATARI_MODULE if choice.is_ale else "")
    known_id = f"{module}:{choice.env_id}" if module else choice.env_id
    frame_skip = (("frameskip", 1),) if choice.is_atari else ()
    return CodeSource(known_id, env_kwargs=(*choice.env_kwargs, *frame_skip), is_atari=choice.is_atari)


def code_of_function(make: Callable[[], object]) -> CodeSource:
    """Return how a program calls a function, by its name if it has one."""
    name = getattr(make, "__name__", "")
    return CodeSource(function=name if name.isidentifier() else "make_env")


def code_text(source: CodeSource, configuration: Configuration, num_envs: int) -> str:
    """Return a program of a few lines that makes the envs."""
    keywords = "".join(f", {name}={value!r}" for name, value in configuration.keywords().items()).replace("'", '"')
    imports = ["import stepmill"]
    is_kernel = configuration.backend is BackendName.KERNEL
    wrappers = ""
    body: list[str] = []
    if source.is_atari:
        imports.insert(0, "from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation")
        body = [*_PREPROCESSING.splitlines(), "", ""]
        wrappers = ", wrappers=[preprocess]"
    kwargs = f", env_kwargs={dict(source.env_kwargs)!r}" if source.env_kwargs and not is_kernel else ""
    total = f"{num_envs} + {configuration.spare_envs}" if configuration.spare_envs else str(num_envs)
    batch = "" if configuration.batch_size is None else f", batch_size={configuration.batch_size}"
    if source.id is None:
        count = f"({total})" if configuration.spare_envs else total
        made = "VectorEnv" if configuration.batch_size is None else "Pool"
        if source.module:
            imports.append(f"from {source.module} import {source.function}")
        given = ", ".join(f"{name}={value!r}" for name, value in source.env_kwargs)
        function = f"lambda: {source.function}({given})" if given else source.function
        call = f"{_variable(configuration)} = stepmill.{made}([{function}] * {count}{batch}{keywords})"
    elif configuration.batch_size is None:
        call = f'envs = stepmill.make_vec("{source.id}", num_envs={num_envs}{kwargs}{wrappers}{keywords})'
    else:
        imports.insert(0, "import gymnasium")
        arguments = "".join(f", {name}={value!r}" for name, value in source.env_kwargs)
        made = f'gymnasium.make("{source.id}", disable_env_checker=True{arguments})'
        made = f"preprocess({made})" if source.is_atari else made
        call = f"pool = stepmill.Pool([lambda: {made}] * {num_envs}{batch}{keywords})"
    # Needed in every program that starts processes, because a worker may import the program.
    return "\n".join([*imports, "", *(["", *body] if body else []), call])


def _variable(configuration: Configuration) -> str:
    return "envs" if configuration.batch_size is None else "pool"
