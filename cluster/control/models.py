"""From `model.source` to a directory on this machine, before anything is started."""

from pathlib import Path

from twostroke.cluster.config import Config
from twostroke.cluster.control.local_ray import Say


def resolve_model(config: Config, cache: Path, say: Say) -> Config:
    """`config` with the model's directory as its source and a name for clients; fetches it when it is not here.

    A fake model is left as it is. Raises ConfigError.
    """
    if config.model.fake:
        return config
    directory = pull_model(config.model.source, cache, say)
    from twostroke.engine.model.source import model_name

    name = config.model.name or model_name(config.model.source)
    model = config.model.model_copy(update={"source": str(directory), "name": name})
    return config.model_copy(update={"model": model})


def pull_model(source: str, cache: Path, say: Say) -> Path:
    """Absolute path of the model's directory. Raises ConfigError."""
    from twostroke.engine.model.source import resolve  # of the `engine` extra

    return resolve(source, cache, say).absolute()
