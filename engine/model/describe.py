"""Facts about a model directory that need no torch: what a router, a registry and a layout want to know."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from twostroke.cluster.core.errors import ConfigError
from twostroke.engine.model.config import ModelConfig, load_model_config, read_json

_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelDescription:
    fingerprint: str
    """Equal exactly for equal weights and settings; part of every page layout and prefix key."""
    end_token_ids: tuple[int, ...]
    config: ModelConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions


def describe_model(directory: Path) -> ModelDescription:
    """Read a model directory without loading it. Raises ConfigError for one that cannot be served."""
    config = load_model_config(directory)
    raw = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    ends = generation.get("eos_token_id", raw.get("eos_token_id"))
    return ModelDescription(
        fingerprint=fingerprint(directory, raw),
        end_token_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),),
        config=config,
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, by its index where it is sharded. Raises ConfigError if there are none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        what = ", ".join(str(path) for path in missing) or f"{directory}/*.safetensors"
        raise ConfigError([f"model.source: no weights at {what}"])
    return files


def fingerprint(directory: Path, raw: dict[str, Any]) -> str:
    """Hash of the settings and of each weight file's size, head and evenly spread samples.

    Reads at most 256 KiB a file, so that a start is cheap for weights of any size; a fine-tune changes nearly
    every weight, hence every sample.
    """
    ignored = ("_name_or_path", "transformers_version", "architectures")
    settings = {key: value for key, value in raw.items() if key not in ignored}
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for path in weight_files(directory):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
