"""What can be said about the Triton kernels without a GPU: they index right, and they compile for one.

1. The interpreter suite, in a process of its own: TRITON_INTERPRET must be set before anything imports Triton, and
   must not be for anybody else.
2. Each kernel compiled down to machine code for a GPU that is not there. The interpreter accepts programs that the
   compiler refuses; this finds them, as well as tiles that do not fit a GPU's shared memory.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SUITE = Path(__file__).with_name("interpreter_suite.py")
ROOT = Path(__file__).parents[3]


def test_the_cpu_path_never_imports_triton() -> None:
    program = (
        "import sys, torch\n"
        "from twostroke.kernels.select import select_ops\n"
        "select_ops(torch.device('cpu'))\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=_environment())


@pytest.mark.timeout(300)  # a minute on a free core
def test_every_kernel_equals_its_twin_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    environment = _environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr


def _environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **extra}


class Variant(NamedTuple):
    """One specialization of a kernel; constants by name, pointers not named here are to the dtype under test."""

    kernel: str
    constants: dict[str, Any]
    num_warps: int = 4


def _attention(head_dim: int, group: int, element_bytes: int) -> list[Variant]:
    from twostroke.kernels import paged_decode_attention, ragged_prefill_attention

    decode = paged_decode_attention.decode_constants(head_dim, group, element_bytes)
    prefill = ragged_prefill_attention.prefill_constants(head_dim, group, element_bytes)
    warps = 4 if head_dim <= 128 else 8
    return [
        Variant("paged_decode_attention._partial_kernel", {**decode, "PAGE_SIZE": 16, "SPLITS": 1}, warps),
        Variant("paged_decode_attention._partial_kernel", {**decode, "PAGE_SIZE": 16, "SPLITS": 8}, warps),
        Variant("ragged_prefill_attention._prefill_kernel", {**prefill, "PAGE_SIZE": 16}, warps),
    ]


SIMPLE = [
    Variant("paged_decode_attention._combine_kernel", {"HEAD_DIM": 64, "SPLITS": 8, "BLOCK_D": 64}, 2),
    Variant("write_kv._write_kernel", {"KV_HEADS": 3, "HEAD_DIM": 64, "PAGE_SIZE": 16, "BLOCK": 256}),
    Variant("page_copy._copy_kernel", {"TO_POOL": True, "BLOCK": 4096}),
    Variant("page_copy._copy_kernel", {"TO_POOL": False, "BLOCK": 4096}),
    Variant("rms_norm._rms_norm_kernel", {"DIM": 576, "BLOCK": 1024}),
    Variant(
        "rope._rope_kernel",
        {"HEADS": 9, "KV_HEADS": 3, "HALF": 32, "BLOCK_H": 16, "BLOCK_KV_H": 4, "BLOCK_D": 32},
    ),
    Variant("silu_mul._silu_mul_kernel", {"BLOCK": 1024}),
]
POINTERS = {
    "table_ptr": "*i32",
    "starts_ptr": "*i32",
    "lengths_ptr": "*i32",
    "slots_ptr": "*i64",
    "pages_ptr": "*i64",
    "lse_ptr": "*fp32",
    "partial_ptr": "*fp32",
}
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes that one block may use, by compute capability (A100, L4 and RTX 4090, H100 and H200)."""


def _compile(variant: Variant, dtype: str, capability: int) -> None:
    """Raises what the compiler raises; asserts that the kernel fits the GPU's shared memory."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = variant.kernel.split(".")
    function = getattr(importlib.import_module(f"twostroke.kernels.{module}"), name)
    signature = {argument: _type(argument, variant, dtype) for argument in function.arg_names}
    source = ASTSource(function, signature, variant.constants, None)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": variant.num_warps})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


def _type(argument: str, variant: Variant, dtype: str) -> str:
    if argument in variant.constants:
        return "constexpr"
    if argument.endswith("_ptr"):
        return POINTERS.get(argument, f"*{dtype}")
    return "fp32" if argument in ("scale_log2", "eps") else "i32"


# Triton 3.9 announces a change of a default that none of our kernels depends on.
announced = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")


@pytest.fixture(autouse=True)
def _own_compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@announced
def test_every_kernel_compiles_for_hopper() -> None:
    for variant in [*_attention(128, 4, 2), *SIMPLE]:
        _compile(variant, "bf16", 90)


@pytest.mark.slow
@announced
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp16", 2), ("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (80, 1), (128, 8), (256, 2)])
def test_attention_compiles_and_fits(
    capability: int, dtype: str, element_bytes: int, head_dim: int, group: int
) -> None:
    for variant in _attention(head_dim, group, element_bytes):
        _compile(variant, dtype, capability)
