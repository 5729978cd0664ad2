"""The first step of an engine's life, before it has a job: kernels are compiled, thread pools and buffers are made,
and a device or a model that cannot compute is found out before anybody relies on it.
"""

from twostroke.cluster.core.ids import JobId, PageId, RequestId
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.executor import Executor
from twostroke.engine.plan import Plan, SampleInput


def warm_up(executor: Executor) -> None:
    """One decode row and one short prompt in page 0, which nobody owns yet. Raises what the step raises."""
    job = JobId(RequestId("warm-up"), 0, 0)
    count = min(2, executor.memory.layout.page_size)
    item = SampleInput(SamplingParams(max_tokens=1), (0,), ())
    tables = [[PageId(0)], [PageId(0)]]
    plan = Plan([job, job], [0, 0], [1, count], [0] * (1 + count), [tables[0], tables[1]], [item, item])
    executor.launch(plan).result()
