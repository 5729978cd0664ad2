"""The Llama family's forward pass on a CPU as one compiled kernel, weights packed as float16.

    each layer:  norm -> qkv -> rotate, write k and v to their slots -> attention -> x += output
                 norm -> gate, up, silu * -> x += down
    at the end:  norm -> head, of the sampled tokens alone, to which the last layer narrows behind its attention

A decode row is a prefill of one token here. Attention works on blocks of a row's neighbouring tokens: each key and
value is loaded once for all query heads of its group and all tokens of the block. Weights lie in panels
`[panel, k, 16 outputs]`, read front to back once a step, whatever the number of rows.
"""

from typing import Any, NamedTuple

import numpy as np

from twostroke.kernels.cpu_intrinsics import (
    SCORE_KEYS,
    SCORE_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    half_tile_1,
    half_tile_2,
    half_tile_3,
    half_tile_4,
    half_tile_5,
    half_tile_6,
    prefetch,
    score_tile_1x1,
    score_tile_1x4,
    score_tile_2x1,
    score_tile_2x4,
    score_tile_3x1,
    score_tile_3x4,
    value_tile_1,
    value_tile_2,
    value_tile_3,
    value_tile_4,
    value_tile_5,
    value_tile_6,
)
from twostroke.kernels.cpu_ops import compiled, exponentials, normalize, rotate, softmax
from twostroke.kernels.cpu_team import claim, finish, wait

Array = Any
OPERATIONS_PER_LAYER = 8
BLOCK_MEMBERS = 12
"""Tokens x query heads that share one pass over keys and values: two tiles of values."""

_WRITE, _ADD, _SILU_MUL = 0, 1, 2
_HALF_TILE = TILE_COLUMNS // 2


class Projections(NamedTuple):
    """One projection of all layers."""

    panels: Array
    """uint16 (float16 bits) `[layers, panels * k * 16]`"""
    bias: Array
    """float32 `[layers, panels * 16]`, or `[layers, 0]`"""


class Weights(NamedTuple):
    """All contiguous. A `gate_up` panel holds eight gates and their eight ups."""

    input_norm: Array
    """float32 `[layers, hidden]`"""
    qkv: Projections
    q_norm: Array
    """float32 `[layers, dim]`, or `[layers, 0]`"""
    k_norm: Array
    output: Projections
    post_norm: Array
    gate_up: Projections
    down: Projections
    final_norm: Array
    """float32 `[1, hidden]`"""
    head: Projections


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    page_stride: int
    """float32 elements from a page to the next, from a layer to the next, from keys to values."""
    layer_stride: int
    value_stride: int
    eps: Any
    scale: Any
    threads: int


class Rows(NamedTuple):
    """What a step computes. `tokens` is the number of new tokens."""

    cos: Array
    """float32 `[tokens, dim]`"""
    sin: Array
    slots: Array
    """int64 `[tokens]`"""
    blocks: Array
    """int64 `[blocks, 4]`: row, first token, number of tokens, KV length that the first one sees."""
    page_table: Array
    """int32 `[rows, max_pages]`"""
    sampled: Array
    """int64 `[sampled]`, ascending."""


class Buffers(NamedTuple):
    """float32, at least `tokens` rows each; `x` comes in as the embedded tokens."""

    x: Array
    h: Array
    qkv: Array
    q: Array
    attended: Array
    inner: Array
    logits: Array
    """`[sampled, panels * 16]`"""


def pack_panels(weight: Array) -> Array:
    """float32 `[outputs, k]` -> uint16 `[panels * k * 16]`, outputs padded with zeros; beyond float16 saturated."""
    outputs, k = weight.shape
    padded = np.zeros((-(-outputs // TILE_COLUMNS) * TILE_COLUMNS, k), dtype=np.float16)
    limit = np.float32(np.finfo(np.float16).max)
    padded[:outputs] = np.clip(weight, -limit, limit)
    panels = padded.reshape(-1, TILE_COLUMNS, k).transpose(0, 2, 1)
    return np.ascontiguousarray(panels).reshape(-1).view(np.uint16)


def interleave(gate: Array, up: Array) -> Array:
    """`[outputs, ...]` twice -> `[2 * outputs, ...]`: eight of the one, eight of the other, and so on."""
    cut = (-1, _HALF_TILE, *gate.shape[1:])
    both = np.concatenate((gate.reshape(cut), up.reshape(cut)), axis=1)
    return np.ascontiguousarray(both.reshape(2 * gate.shape[0], *gate.shape[1:]))


@compiled
def decoder_kernel(weights: Any, shape: Any, rows: Any, buffers: Any, kv: Array, counters: Array) -> None:
    """Run by every thread of a team. `kv` is the whole pool, flat: a page's layers, each keys and then values."""
    threads = shape.threads
    longest = 0
    for block in range(rows.blocks.shape[0]):
        longest = max(longest, rows.blocks[block, 3] + rows.blocks[block, 2] - 1)
    group = shape.heads // shape.kv_heads
    members = max(BLOCK_MEMBERS, group)
    room = longest + SCORE_KEYS
    scores = np.empty((members, room), dtype=np.float32)
    powers = np.empty(max(room, TILE_ROWS * TILE_COLUMNS), dtype=np.int32)
    queries = np.empty((members, shape.dim), dtype=np.float32)
    result = np.empty((members, shape.dim), dtype=np.float32)
    tile = np.empty((TILE_ROWS, TILE_COLUMNS), dtype=np.float32)
    gates = np.empty(TILE_ROWS * _HALF_TILE, dtype=np.float32)
    normed = np.empty(shape.dim, dtype=np.float32)

    x, h = buffers.x, buffers.h
    tokens = rows.slots.shape[0]
    layers = weights.input_norm.shape[0]
    done = 0
    for layer in range(layers):
        _norm(x, weights.input_norm[layer], shape.eps, h, tokens, threads, counters, done)
        _project(h, tokens, weights.qkv, layer, buffers.qkv, _WRITE, tile, gates, powers, threads, counters, done + 1)
        layer_at = layer * shape.layer_stride
        q_norm, k_norm = weights.q_norm[layer], weights.k_norm[layer]
        _rotate_and_write(shape, rows, buffers, q_norm, k_norm, kv, layer_at, normed, counters, done + 2)
        items = rows.blocks.shape[0] * shape.kv_heads
        while True:
            item = claim(counters, done + 3, 1)
            if item >= items:
                break
            _attend(shape, rows, buffers, kv, layer_at, item, scores, powers, queries, result)
            finish(counters, done + 3, 1)
        wait(counters, done + 3, items)
        if layer == layers - 1:
            _narrow(rows.sampled, x, buffers.attended, tokens, counters, layers * OPERATIONS_PER_LAYER)
            tokens = rows.sampled.shape[0]
            if tokens == 0:
                return
        attended, inner = buffers.attended, buffers.inner
        _project(attended, tokens, weights.output, layer, x, _ADD, tile, gates, powers, threads, counters, done + 4)
        _norm(x, weights.post_norm[layer], shape.eps, h, tokens, threads, counters, done + 5)
        _project(h, tokens, weights.gate_up, layer, inner, _SILU_MUL, tile, gates, powers, threads, counters, done + 6)
        _project(inner, tokens, weights.down, layer, x, _ADD, tile, gates, powers, threads, counters, done + 7)
        done += OPERATIONS_PER_LAYER
    _norm(x, weights.final_norm[0], shape.eps, h, tokens, threads, counters, done + 1)
    _project(h, tokens, weights.head, 0, buffers.logits, _WRITE, tile, gates, powers, threads, counters, done + 2)


def num_operations(layers: int) -> int:
    return layers * OPERATIONS_PER_LAYER + 3


@compiled
def _narrow(sampled: Array, x: Array, attended: Array, tokens: int, counters: Array, operation: int) -> None:
    """Move the sampled tokens' rows to the front. In place: they ascend, so none is overwritten before it is read."""
    if sampled.shape[0] == tokens:
        return
    if claim(counters, operation, 1) == 0:
        for place in range(sampled.shape[0]):
            x[place] = x[sampled[place]]
            attended[place] = attended[sampled[place]]
        finish(counters, operation, 1)
    wait(counters, operation, 1)


@compiled
def _norm(
    x: Array, weight: Array, eps: Any, out: Array, tokens: int, threads: int, counters: Array, operation: int
) -> None:
    size = max(1, tokens // (threads * 4))
    while True:
        begin = claim(counters, operation, size)
        if begin >= tokens:
            break
        end = min(begin + size, tokens)
        for token in range(begin, end):
            normalize(x[token], weight, eps, out[token])
        finish(counters, operation, end - begin)
    wait(counters, operation, tokens)


@compiled
def _project(
    x: Array,
    tokens: int,
    projections: Any,
    layer: int,
    out: Array,
    mode: int,
    tile: Array,
    gates: Array,
    powers: Array,
    threads: int,
    counters: Array,
    operation: int,
) -> None:
    """x `[tokens, k]` times one layer's panels; what becomes of the sums is `mode`."""
    k = x.shape[1]
    panels, bias = projections.panels[layer], projections.bias[layer]
    items = panels.shape[0] // (k * TILE_COLUMNS)
    size = max(1, items // (threads * 8))
    parts = (tokens + TILE_ROWS - 1) // TILE_ROWS
    while True:
        first = claim(counters, operation, size)
        if first >= items:
            break
        last = min(first + size, items)
        for panel in range(first, last):
            begin = 0
            for part in range(parts):
                end = tokens * (part + 1) // parts
                _half_tile(x, begin, end - begin, k, panels, panel, tile)
                if bias.shape[0]:
                    for row in range(end - begin):
                        for column in range(TILE_COLUMNS):
                            tile[row, column] += bias[panel * TILE_COLUMNS + column]
                _take(tile, begin, end - begin, panel, out, mode, gates, powers)
                begin = end
        finish(counters, operation, last - first)
    wait(counters, operation, items)


@compiled
def _half_tile(x: Array, begin: int, count: int, k: int, panels: Array, panel: int, tile: Array) -> None:
    x_at, w_at = begin * k, panel * k * TILE_COLUMNS
    if count == 6:
        half_tile_6(x, x_at, k, panels, w_at, TILE_COLUMNS, k, tile, TILE_COLUMNS)
    elif count == 5:
        half_tile_5(x, x_at, k, panels, w_at, TILE_COLUMNS, k, tile, TILE_COLUMNS)
    elif count == 4:
        half_tile_4(x, x_at, k, panels, w_at, TILE_COLUMNS, k, tile, TILE_COLUMNS)
    elif count == 3:
        half_tile_3(x, x_at, k, panels, w_at, TILE_COLUMNS, k, tile, TILE_COLUMNS)
    elif count == 2:
        half_tile_2(x, x_at, k, panels, w_at, TILE_COLUMNS, k, tile, TILE_COLUMNS)
    elif count == 1:
        half_tile_1(x, x_at, k, panels, w_at, TILE_COLUMNS, k, tile, TILE_COLUMNS)


@compiled
def _take(tile: Array, begin: int, count: int, panel: int, out: Array, mode: int, gates: Array, powers: Array) -> None:
    if mode == _SILU_MUL:
        for row in range(count):
            for column in range(_HALF_TILE):
                gates[row * _HALF_TILE + column] = -tile[row, column]
        exponentials(gates, powers, count * _HALF_TILE)
        for row in range(count):
            for column in range(_HALF_TILE):
                divisor = np.float32(1.0) + gates[row * _HALF_TILE + column]
                value = tile[row, column] * tile[row, _HALF_TILE + column] / divisor
                out[begin + row, panel * _HALF_TILE + column] = value
        return
    for row in range(count):
        target = out[begin + row, panel * TILE_COLUMNS : (panel + 1) * TILE_COLUMNS]
        if mode == _ADD:
            for column in range(TILE_COLUMNS):
                target[column] += tile[row, column]
        else:
            for column in range(TILE_COLUMNS):
                target[column] = tile[row, column]


@compiled
def _rotate_and_write(
    shape: Any,
    rows: Any,
    buffers: Any,
    q_norm: Array,
    k_norm: Array,
    kv: Array,
    layer_at: int,
    normed: Array,
    counters: Array,
    operation: int,
) -> None:
    """Queries leave scaled, so that scores need not be."""
    tokens, dim, page_size = rows.slots.shape[0], shape.dim, shape.page_size
    size = max(1, tokens // (shape.threads * 4))
    while True:
        first = claim(counters, operation, size)
        if first >= tokens:
            break
        last = min(first + size, tokens)
        for token in range(first, last):
            cos, sin, source = rows.cos[token], rows.sin[token], buffers.qkv[token]
            for head in range(shape.heads):
                vector = source[head * dim : (head + 1) * dim]
                if q_norm.shape[0]:
                    normalize(vector, q_norm, shape.eps, normed)
                    vector = normed
                query = buffers.q[token, head * dim : (head + 1) * dim]
                rotate(vector, cos, sin, query)
                for i in range(dim):
                    query[i] *= shape.scale
            page, slot = rows.slots[token] // page_size, rows.slots[token] % page_size
            for head in range(shape.kv_heads):
                begin = (shape.heads + head) * dim
                vector = source[begin : begin + dim]
                if k_norm.shape[0]:
                    normalize(vector, k_norm, shape.eps, normed)
                    vector = normed
                at = page * shape.page_stride + layer_at + (head * page_size + slot) * dim
                rotate(vector, cos, sin, kv[at : at + dim])
                value, begin = kv[at + shape.value_stride : at + shape.value_stride + dim], begin + shape.kv_heads * dim
                for i in range(dim):
                    value[i] = source[begin + i]
        finish(counters, operation, last - first)
    wait(counters, operation, tokens)


@compiled
def _attend(
    shape: Any,
    rows: Any,
    buffers: Any,
    kv: Array,
    layer_at: int,
    item: int,
    scores: Array,
    powers: Array,
    queries: Array,
    result: Array,
) -> None:
    """One block of tokens and one KV head: scores, softmax over what each token sees, weights times values."""
    block, head = rows.blocks[item // shape.kv_heads], item % shape.kv_heads
    first, count, seen = block[1], block[2], block[3]
    table = rows.page_table[block[0]]
    dim, page_size, group = shape.dim, shape.page_size, shape.heads // shape.kv_heads
    members, longest = count * group, seen + count - 1
    num_pages = (longest + page_size - 1) // page_size
    head_at = layer_at + head * page_size * dim
    for member in range(members):
        begin = (head * group + member % group) * dim
        for i in range(dim):
            queries[member, i] = buffers.q[first + member // group, begin + i]
            result[member, i] = 0.0
    for page in range(num_pages):
        used = min(page_size, longest - page * page_size)
        at = table[page] * shape.page_stride + head_at
        # The next keys, and after the last the first values.
        if page + 1 < num_pages:
            following = table[page + 1] * shape.page_stride + head_at
        else:
            following = table[0] * shape.page_stride + head_at + shape.value_stride
        _score_page(queries, members, kv, at, used, dim, scores, page * page_size, following)
    for member in range(members):
        length = seen + member // group
        softmax(scores[member], powers, length)
        for place in range(length, longest):
            scores[member, place] = 0.0
    for page in range(num_pages):
        used = min(page_size, longest - page * page_size)
        at = table[page] * shape.page_stride + head_at + shape.value_stride
        following = at
        if page + 1 < num_pages:
            following = table[page + 1] * shape.page_stride + head_at + shape.value_stride
        _add_values(scores, members, page * page_size, used, kv, at, dim, result, following)
    for member in range(members):
        begin = (head * group + member % group) * dim
        for i in range(dim):
            buffers.attended[first + member // group, begin + i] = result[member, i]


@compiled
def _score_page(
    queries: Array, members: int, kv: Array, at: int, used: int, dim: int, scores: Array, start: int, following: int
) -> None:
    room = scores.shape[1]
    for slot in range(0, used - SCORE_KEYS + 1, SCORE_KEYS):
        for i in range(0, SCORE_KEYS * dim, 16):
            prefetch(kv, following + slot * dim + i)
        for member in range(0, members, SCORE_ROWS):
            left, to = members - member, member * room + start + slot
            if left >= 3:
                score_tile_3x4(queries, member * dim, kv, at + slot * dim, dim, scores, to, room)
            elif left == 2:
                score_tile_2x4(queries, member * dim, kv, at + slot * dim, dim, scores, to, room)
            else:
                score_tile_1x4(queries, member * dim, kv, at + slot * dim, dim, scores, to, room)
    for slot in range(used - used % SCORE_KEYS, used):
        for member in range(0, members, SCORE_ROWS):
            left, to = members - member, member * room + start + slot
            if left >= 3:
                score_tile_3x1(queries, member * dim, kv, at + slot * dim, dim, scores, to, room)
            elif left == 2:
                score_tile_2x1(queries, member * dim, kv, at + slot * dim, dim, scores, to, room)
            else:
                score_tile_1x1(queries, member * dim, kv, at + slot * dim, dim, scores, to, room)


@compiled
def _add_values(
    scores: Array, members: int, start: int, used: int, kv: Array, at: int, dim: int, result: Array, following: int
) -> None:
    room = scores.shape[1]
    columns = dim // TILE_COLUMNS
    for column in range(columns):
        for i in range(used * dim // 16 * column // columns, used * dim // 16 * (column + 1) // columns):
            prefetch(kv, following + i * 16)
        for member in range(0, members, TILE_ROWS):
            left, x_at = members - member, member * room + start
            w_at, out = at + column * TILE_COLUMNS, result[member:, column * TILE_COLUMNS :]
            if left >= 6:
                value_tile_6(scores, x_at, room, kv, w_at, dim, used, out, dim)
            elif left == 5:
                value_tile_5(scores, x_at, room, kv, w_at, dim, used, out, dim)
            elif left == 4:
                value_tile_4(scores, x_at, room, kv, w_at, dim, used, out, dim)
            elif left == 3:
                value_tile_3(scores, x_at, room, kv, w_at, dim, used, out, dim)
            elif left == 2:
                value_tile_2(scores, x_at, room, kv, w_at, dim, used, out, dim)
            else:
                value_tile_1(scores, x_at, room, kv, w_at, dim, used, out, dim)
