"""Times each GPU kernel against its torch peer and against what the machine could do at best.

    python benchmarks/kernels.py [--dtype bfloat16] [--json results.json]

A row gives the kernel's and the peer's time and `of limit`: the time that the device's own limit would allow, over
the time taken. The limit is measured here, not looked up: bytes moved over the rate of a large copy, or
operations over the rate of a large matrix product, whichever is longer. 1.00 is perfect.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from twostroke.kernels import reference
from twostroke.kernels.select import Ops, select_ops

HEADS, KV_HEADS, DIM, PAGE, HIDDEN, INTER, LAYERS = 32, 8, 128, 16, 4096, 14336, 4


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    size: str
    run: Callable[[], object]
    peer: Callable[[], object]
    bytes_moved: int
    operations: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    op: str
    size: str
    kernel_us: float
    peer_us: float
    peer_over_kernel: float
    of_limit: float


def time_us(run: Callable[[], object]) -> float:
    """Median of 20 timings between CUDA events, after a warm-up that also compiles."""
    for _ in range(3):
        run()
    samples = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return sorted(samples)[len(samples) // 2]


def measured_limits(dtype: torch.dtype) -> tuple[float, float]:
    """(bytes a us, operations a us) of this device."""
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block)
    bandwidth = 2 * block.numel() / time_us(lambda: target.copy_(block))
    square = torch.randn(8192, 8192, device="cuda").to(dtype)
    peak = 2 * 8192**3 / time_us(lambda: square @ square)
    return bandwidth, peak


def attention_cases(ops: Ops, dtype: torch.dtype) -> list[Case]:
    """The peer is SDPA over keys and values gathered beforehand: it does less than the kernel, which reads pages."""
    cases: list[Case] = []
    scale = DIM**-0.5
    for rows, length in ((1, 8192), (8, 2048), (64, 2048), (256, 1024)):
        pages = -(-length // PAGE)
        pool = torch.randn(rows * pages, LAYERS, 2, KV_HEADS, PAGE, DIM, device="cuda").to(dtype)
        kv = pool[:, 1]
        table = torch.randperm(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
        lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
        q = torch.randn(rows, HEADS, DIM, device="cuda").to(dtype)
        dense = torch.randn(2, rows, KV_HEADS, length, DIM, device="cuda").to(dtype)
        cases.append(
            Case(
                "paged_decode_attention",
                f"{rows} x {length}",
                lambda q=q, kv=kv, t=table, n=lengths: ops.paged_decode_attention(q, kv, t, n, scale),
                lambda q=q, d=dense: F.scaled_dot_product_attention(q.unsqueeze(2), d[0], d[1], enable_gqa=True),
                2 * rows * length * KV_HEADS * DIM * dtype.itemsize,
                4 * rows * length * HEADS * DIM,
            )
        )
    for new, prefix in ((512, 0), (2048, 0), (512, 8192)):
        length = new + prefix
        pages = -(-length // PAGE)
        kv = torch.randn(pages, LAYERS, 2, KV_HEADS, PAGE, DIM, device="cuda").to(dtype)[:, 1]
        table = torch.randperm(pages, device="cuda", dtype=torch.int32)[None]
        bounds = torch.tensor([0, new, length], device="cuda", dtype=torch.int32)
        q = torch.randn(new, HEADS, DIM, device="cuda").to(dtype)
        dense = torch.randn(2, 1, KV_HEADS, length, DIM, device="cuda").to(dtype)
        mask = torch.ones(new, length, dtype=torch.bool, device="cuda").tril(prefix)
        cases.append(
            Case(
                "ragged_prefill_attention",
                f"{new} after {prefix}",
                lambda q=q, kv=kv, t=table, b=bounds: ops.ragged_prefill_attention(q, kv, t, b[:2], b[2:], scale),
                lambda q=q, d=dense, m=mask: F.scaled_dot_product_attention(
                    q.transpose(0, 1)[None], d[0], d[1], attn_mask=m, enable_gqa=True
                ),
                2 * (length * KV_HEADS + new * HEADS) * DIM * dtype.itemsize,
                4 * HEADS * DIM * (new * prefix + new * (new + 1) // 2),
            )
        )
    return cases


def other_cases(ops: Ops, dtype: torch.dtype) -> list[Case]:
    """The peer is the torch twin; for copies torch's own indexing."""
    cases: list[Case] = []
    size = dtype.itemsize
    pool = torch.randn(2048, LAYERS, 2, KV_HEADS, PAGE, DIM, device="cuda").to(dtype)
    page_bytes = pool[0].numel() * size
    pages = torch.randperm(2048, device="cuda")[:512]
    data = pool[pages]
    cases += [
        Case(
            "gather_pages",
            "512 pages",
            lambda: ops.gather_pages(pool, pages),
            lambda: pool[pages],
            2 * 512 * page_bytes,
        ),
        Case(
            "scatter_pages",
            "512 pages",
            lambda: ops.scatter_pages(pool, pages, data),
            lambda: reference.scatter_pages(pool, pages, data),
            2 * 512 * page_bytes,
        ),
    ]
    weight = torch.randn(HIDDEN, device="cuda").to(dtype)
    for tokens in (64, 2048):
        x = torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
        gate_up = torch.randn(tokens, 2 * INTER, device="cuda").to(dtype)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda").to(dtype)
        angle = torch.randn(tokens, DIM, device="cuda")
        slots = torch.randperm(2048 * PAGE, device="cuda")[:tokens]
        named: list[tuple[str, Callable[[Any], object], int]] = [
            ("rms_norm", lambda o, x=x: o.rms_norm(x, weight, 1e-5), 2 * x.numel() * size),
            ("silu_mul", lambda o, g=gate_up: o.silu_mul(g), 3 * tokens * INTER * size),
            (
                "rotate_and_write",
                lambda o, x=qkv, a=angle, s=slots: o.rotate_and_write(x, None, None, 1e-5, a, a, pool[:, 1], s),
                2 * qkv.numel() * size + angle.numel() * 4,
            ),
        ]
        for name, run, moved in named:
            cases.append(Case(name, f"{tokens} tokens", lambda r=run: r(ops), lambda r=run: r(reference), moved))
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device: none here", file=sys.stderr)
        return 1
    dtype = getattr(torch, arguments.dtype)
    bandwidth, peak = measured_limits(dtype)
    ops = select_ops(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, {arguments.dtype}: {bandwidth / 1e6:.2f} TB/s, {peak / 1e6:.0f} TFLOP/s")
    print(f"{'op':26} {'size':>16} {'kernel us':>10} {'peer us':>10} {'peer/kernel':>12} {'of limit':>9}")
    results = []
    for case in attention_cases(ops, dtype) + other_cases(ops, dtype):
        kernel, peer = time_us(case.run), time_us(case.peer)
        limit = max(case.bytes_moved / bandwidth, case.operations / peak)
        result = Result(case.op, case.size, kernel, peer, peer / kernel, limit / kernel)
        results.append(asdict(result))
        print(f"{case.op:26} {case.size:>16} {kernel:10.1f} {peer:10.1f} {peer / kernel:12.2f} {limit / kernel:9.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"dtype": arguments.dtype, "rows": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
