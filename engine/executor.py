"""The border between scheduling and compute, and its deterministic fake.

`launch` and `result` are called on the engine thread only. An executor never changes page ownership; it
writes the slots of a plan's new tokens and reads the slots of earlier ones.
"""

from typing import Protocol

from twostroke.cluster.core.layout import PageMemory
from twostroke.engine.plan import Plan, StepResult


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step and return its tokens. Called exactly once, in launch order."""
        ...


class Executor(Protocol):
    @property
    def memory(self) -> PageMemory:
        """The page pool that it computes on; shared with the transports."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take as they are held, packed forms included."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Context length of the model, in tokens."""
        ...

    def launch(self, plan: Plan) -> StepHandle:
        """Start the step. Raises nothing for a valid plan; `result` raises if the device failed."""
        ...
