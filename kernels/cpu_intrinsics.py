"""What the CPU kernels need and numba has no word for: prefetch, atomics, and a matrix product's innermost tile.

The tile is written in LLVM's vector types: left to the loop vectorizer, its sums do not stay in registers.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I32, _I64, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = 8
_FLOATS, _HALVES = ir.VectorType(_FLOAT, _LANES), ir.VectorType(ir.HalfType(), _LANES)

TILE_COLUMNS = 2 * _LANES
TILE_ROWS = 6
"""Rows x 2 vectors of sums, two of weights and one of x fill the sixteen registers of AVX2."""
SCORE_ROWS = 3
SCORE_KEYS = 4
AHEAD_BYTES = 2048
"""Fp16 weights are asked for this far ahead: a hardware prefetcher stops at the end of each 4 KB of addresses."""

yield_cpu = types.ExternalFunction("sched_yield", types.int32())
"""Let another runnable thread have this CPU."""


def _data(context: Any, builder: Any, signature: Any, arguments: Any, index: int) -> Any:
    return context.make_array(signature.args[index])(context, builder, arguments[index]).data


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # To read, wanted in all cache levels, data.
    builder.call(function, [builder.bitcast(address, _I8.as_pointer()), _I32(0), _I32(3), _I32(1)])


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], which need not be inside the array. `array` is one-dimensional."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature, arguments, 0)
        _prefetch(builder, builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def atomic_add(context: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value, at once for all threads; what it was before. `array` is int64, one-dimensional."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature, arguments, 0)
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), arguments[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def atomic_load(context: Any, array: Any, index: Any) -> Any:
    """array[index] as other threads left it, with all that they wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature, arguments, 0)
        return builder.load_atomic(builder.gep(data, [arguments[1]]), "acquire", 8)

    return types.int64(array, types.int64), generate


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS, _FLOATS])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32"), [a, b, c])


def _load(builder: Any, pointer: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = 2
    return loaded


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer())).align = 4


def _broadcast(builder: Any, pointer: Any) -> Any:
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    scalar = builder.insert_element(undefined, builder.load(pointer), _I32(0))
    return builder.shuffle_vector(scalar, undefined, ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES))


def _sums(
    builder: Any, count: Any, unroll: int, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """A loop over 0, unroll, .. < count (at least once) around `body(index, sums) -> sums`, unrolled."""
    entry, loop, done = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    carried = [builder.phi(_FLOATS) for _ in sums]
    for phi, start in zip(carried, sums, strict=True):
        phi.add_incoming(start, entry)
    current = list(carried)
    for offset in range(unroll):
        current = body(builder.add(index, _I64(offset)), current)
    following = builder.add(index, _I64(unroll))
    index.add_incoming(following, builder.block)
    for phi, value in zip(carried, current, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return current


def _product_tile(rows: int, half: bool) -> Any:
    """out[r, c] (+)= sum over k of x[r, k] * w[k, c], for `rows` rows and TILE_COLUMNS columns.

    half: w is float16 (held as uint16), k a multiple of 4, and `out` is written; else w is float32 and `out` added to.
    """

    @intrinsic
    def tile(
        context: Any, x: Any, x_at: Any, x_step: Any, w: Any, w_at: Any, w_step: Any, k: Any, out: Any, out_step: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, x_at, x_step, _, w_at, w_step, k, _, out_step = arguments
            first = builder.gep(_data(context, builder, signature, arguments, 0), [x_at])
            weights = builder.gep(_data(context, builder, signature, arguments, 3), [w_at])
            target = _data(context, builder, signature, arguments, 7)
            x_rows = [builder.gep(first, [builder.mul(x_step, _I64(row))]) for row in range(rows)]
            places = [
                builder.gep(target, [builder.add(builder.mul(out_step, _I64(row)), _I64(column))])
                for row in range(rows)
                for column in (0, _LANES)
            ]
            zero = ir.Constant(_FLOATS, [0.0] * _LANES)
            start = [zero if half else _load(builder, place, _FLOATS) for place in places]

            def body(index: Any, sums: list[Any]) -> list[Any]:
                line = builder.gep(weights, [builder.mul(index, w_step)])
                columns = []
                for column in (0, _LANES):
                    loaded = _load(builder, builder.gep(line, [_I64(column)]), _HALVES if half else _FLOATS)
                    columns.append(builder.fpext(loaded, _FLOATS) if half else loaded)
                if half:
                    _prefetch(builder, builder.gep(line, [_I64(AHEAD_BYTES // 2)]))
                result = []
                for row in range(rows):
                    value = _broadcast(builder, builder.gep(x_rows[row], [index]))
                    for side, column in enumerate(columns):
                        result.append(_fma(builder, value, column, sums[2 * row + side]))
                return result

            for place, total in zip(places, _sums(builder, k, 4 if half else 1, start, body), strict=True):
                _store(builder, total, place)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(x, whole, whole, w, whole, whole, whole, out, whole), generate

    return tile


def _score_tile(rows: int, keys: int) -> Any:
    """scores[r, scores_at + s] = sum over i < dim of q[r, i] * k[s, i], for `rows` x `keys`; dim a multiple of 8."""

    @intrinsic
    def tile(
        context: Any, q: Any, q_at: Any, k: Any, k_at: Any, dim: Any, scores: Any, scores_at: Any, scores_step: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, q_at, _, k_at, dim, _, scores_at, scores_step = arguments
            queries = builder.gep(_data(context, builder, signature, arguments, 0), [q_at])
            first = builder.gep(_data(context, builder, signature, arguments, 2), [k_at])
            target = builder.gep(_data(context, builder, signature, arguments, 5), [scores_at])
            q_rows = [builder.gep(queries, [builder.mul(dim, _I64(row))]) for row in range(rows)]
            k_rows = [builder.gep(first, [builder.mul(dim, _I64(key))]) for key in range(keys)]

            def body(index: Any, sums: list[Any]) -> list[Any]:
                place = builder.mul(index, _I64(_LANES))
                loaded = [_load(builder, builder.gep(row, [place]), _FLOATS) for row in k_rows]
                result = []
                for row, query in enumerate(q_rows):
                    value = _load(builder, builder.gep(query, [place]), _FLOATS)
                    for key in range(keys):
                        result.append(_fma(builder, value, loaded[key], sums[row * keys + key]))
                return result

            zero = ir.Constant(_FLOATS, [0.0] * _LANES)
            count = builder.sdiv(dim, _I64(_LANES))
            sums = _sums(builder, count, 1, [zero] * (rows * keys), body)
            for row in range(rows):
                place = builder.gep(target, [builder.mul(scores_step, _I64(row))])
                _store(builder, _across(builder, sums[row * keys : (row + 1) * keys]), place)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(q, whole, k, whole, whole, scores, whole, whole), generate

    return tile


def _across(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector's lanes: of four vectors <4 x float>, of one a float."""

    def pick(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    def pairs(a: Any, b: Any) -> Any:
        """Sums of neighbours, in the order in which AVX has one instruction for it."""
        return builder.fadd(pick(a, b, [0, 2, 8, 10, 4, 6, 12, 14]), pick(a, b, [1, 3, 9, 11, 5, 7, 13, 15]))

    full = vectors * 4 if len(vectors) == 1 else vectors
    folded = pairs(pairs(full[0], full[1]), pairs(full[2], full[3]))
    total = builder.fadd(pick(folded, folded, [0, 1, 2, 3]), pick(folded, folded, [4, 5, 6, 7]))
    return builder.extract_element(total, _I32(0)) if len(vectors) == 1 else total


# Compiled code finds an intrinsic by the name of a global, and its cache on disk survives only then.
half_tile_1, half_tile_2, half_tile_3, half_tile_4, half_tile_5, half_tile_6 = (
    _product_tile(rows, half=True) for rows in range(1, TILE_ROWS + 1)
)
value_tile_1, value_tile_2, value_tile_3, value_tile_4, value_tile_5, value_tile_6 = (
    _product_tile(rows, half=False) for rows in range(1, TILE_ROWS + 1)
)
score_tile_1x4, score_tile_2x4, score_tile_3x4 = (_score_tile(rows, SCORE_KEYS) for rows in range(1, SCORE_ROWS + 1))
score_tile_1x1, score_tile_2x1, score_tile_3x1 = (_score_tile(rows, 1) for rows in range(1, SCORE_ROWS + 1))
