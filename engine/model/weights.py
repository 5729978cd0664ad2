"""Tensors of a safetensors directory, single or sharded, read through mmap one at a time."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from twostroke.cluster.core.errors import ConfigError
from twostroke.engine.model.describe import weight_files


class Weights:
    """Open weight files. Use as a context manager; `take` returns each tensor once, in the dtype asked for.

    `unused()` names what nobody took: a model with leftovers is not the model that we think it is.
    """

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._directory = directory
        self._device = device
        self._dtype = dtype
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}
        for path in weight_files(directory):
            file: Any = safe_open(path, framework="pt", device="cpu")
            self._files.append(file.__enter__())
            self._where.update(dict.fromkeys(file.keys(), self._files[-1]))

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises ConfigError for a tensor that is missing or of another shape than the configuration says."""
        file = self._where.pop(name, None)
        if file is None:
            raise ConfigError([f"{self._directory}: weight {name} is missing"])
        tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError([f"{self._directory}: weight {name} is {tuple(tensor.shape)}, not {shape}"])
        # A copy: one tensor that aliases the file keeps all of it mapped, and what was read of it resident.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def unused(self) -> list[str]:
        return sorted(name for name in self._where if not name.endswith("rotary_emb.inv_freq"))
