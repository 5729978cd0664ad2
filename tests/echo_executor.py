"""An executor whose answers are known beforehand: it says the prompt's own tokens back, then the end token."""

from tests.cluster_harness import MakeExecutor
from twostroke.engine.fake_executor import FakeExecutor, FakeHandle
from twostroke.engine.plan import Plan


class EchoExecutor(FakeExecutor):
    """Reads and proves its pages as the fake does; only what it draws is another token."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int, max_positions: int, end_token: int) -> None:
        super().__init__(num_pages, page_size, vocab_size, max_positions)
        self._end_token = end_token

    def launch(self, plan: Plan) -> FakeHandle:
        result = super().launch(plan).result()
        for row, sample in enumerate(plan.sample):
            if sample is not None:
                said = len(sample.output)
                result.tokens[row] = sample.prompt[said] if said < len(sample.prompt) else self._end_token
        return FakeHandle(result, 0.0)


def echoing(page_size: int, vocab_size: int, max_positions: int, end_token: int) -> MakeExecutor:
    return lambda num_pages: EchoExecutor(num_pages, page_size, vocab_size, max_positions, end_token)
