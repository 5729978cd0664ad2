"""A plan as tensors: what the decoder and its kernels read. Built on the host in a few numpy calls, moved once.

token t        0   1   2   3 4 5 6 7   8 9 10
row            r0  r1  r2  ---r3----   --r4--
               decode rows prefill rows (their own query_starts, from 0)
"""

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from twostroke.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: torch.Tensor
    """int64 [tokens]"""
    positions: torch.Tensor
    """int64 [tokens]"""
    slots: torch.Tensor
    """int64 [tokens]: page * page_size + offset, where each new token's k and v go."""
    page_table: torch.Tensor
    """int32 [rows, max_pages]; 0 past a row's last page."""
    lengths: torch.Tensor
    """int32 [rows]: KV tokens, new ones included."""
    num_decode: int
    """Leading rows with one new token; their tokens are the first `num_decode`."""
    query_starts: torch.Tensor
    """int32 [prefill rows + 1], counted from token `num_decode`."""
    sampled_tokens: torch.Tensor
    """int64 [sampled], ascending: the tokens whose logits are wanted; if nothing is scored, the sampled rows' last."""
    sampled_rows: list[int]
    sampled_at: list[int] | None
    """Which of `sampled_tokens` the sampled rows' last tokens are; None: all of them, in order."""
    scored_at: dict[int, int]
    """Which of `sampled_tokens` the first token of each scored row is; its others follow."""


def build_batch(plan: Plan, page_size: int, device: torch.device) -> Batch:
    """Raises ValueError when a page table does not cover its row: a scheduler's fault, caught before any write."""
    num_new = np.array(plan.num_new, dtype=np.int64)
    lengths = np.array(plan.num_computed, dtype=np.int64) + num_new
    ends = np.cumsum(num_new)
    if ends[-1] != len(plan.tokens):
        raise ValueError(f"plan has {len(plan.tokens)} tokens, its rows {ends[-1]}")
    num_pages = -(-lengths // page_size)
    table = np.zeros((len(num_new), int(num_pages.max())), dtype=np.int32)
    for row, (pages, needed) in enumerate(zip(plan.page_tables, num_pages.tolist(), strict=True)):
        if len(pages) < needed:
            raise ValueError(f"{plan.jobs[row]}: {len(pages)} pages, {needed} needed")
        table[row, :needed] = pages[:needed]
    row_of_token = np.repeat(np.arange(len(num_new)), num_new)
    positions = np.arange(len(plan.tokens)) - np.repeat(ends - lengths, num_new)
    slots = table[row_of_token, positions // page_size].astype(np.int64) * page_size + positions % page_size
    num_decode = sum(1 for _ in takewhile(lambda count: count == 1, plan.num_new))
    sampled_rows = [row for row, sample in enumerate(plan.sample) if sample is not None]

    wanted, sampled_at, scored_at = ends[sampled_rows] - 1, None, {}
    if plan.score:
        starts = ends - num_new
        scored = [np.arange(starts[row], starts[row] + len(item.targets)) for row, item in plan.score.items()]
        lasts, wanted = wanted, np.unique(np.concatenate((wanted, *scored)))
        sampled_at = np.searchsorted(wanted, lasts).tolist()
        scored_at = {row: int(np.searchsorted(wanted, starts[row])) for row in plan.score}

    def move(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        tokens=move(np.array(plan.tokens, dtype=np.int64)),
        positions=move(positions),
        slots=move(slots),
        page_table=move(table),
        lengths=move(lengths.astype(np.int32)),
        num_decode=num_decode,
        query_starts=move(np.concatenate(([0], ends[num_decode:] - num_decode)).astype(np.int32)),
        sampled_tokens=move(wanted),
        sampled_rows=sampled_rows,
        sampled_at=sampled_at,
        scored_at=scored_at,
    )
