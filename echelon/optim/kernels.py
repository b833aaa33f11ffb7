# mypy: ignore-errors
"""Triton kernels for LARS and LAMB: one kernel updates all parameters of a table.

A trust ratio needs the norms of a whole parameter before any of its entries changes, so the kernel passes over every
parameter twice: the first pass *measures* the norms (and updates the moments of LAMB), the second one *applies* the
update. The second pass follows soon after the first and goes from the end backwards, so most of its reads hit the L2
cache. Therefore a step costs little more than a step without trust ratios.

Programs take chunks from one list of work, in order, with an atomic counter (the ticket). A chunk of the second pass
waits until its parameter is measured. This cannot deadlock, whatever the number of resident programs: only a running
program takes a ticket, and a chunk waits only for chunks with earlier tickets. Partial norms are added in the order of
chunks, not of arrival, so the result is bitwise reproducible.

The functions are written in Triton's language rather than in Python, so types are not checked here.
"""

import triton
import triton.language as tl

# Rows of the table, which has one column per parameter.
PARAM: tl.constexpr = tl.constexpr(0)
GRAD: tl.constexpr = tl.constexpr(1)
FIRST_STATE: tl.constexpr = tl.constexpr(2)
SECOND_STATE: tl.constexpr = tl.constexpr(3)
NUMEL: tl.constexpr = tl.constexpr(4)
FIRST_CHUNK: tl.constexpr = tl.constexpr(5)
CHUNKS: tl.constexpr = tl.constexpr(6)
ADAPTIVE: tl.constexpr = tl.constexpr(7)

# Layout of the counters: the ticket in a separate cache line, then for each parameter the number of its measured
# chunks, then for each parameter a flag that is 1 when its trust ratio is known.
ARRIVED: tl.constexpr = tl.constexpr(32)


@triton.jit
def _field(table, row, tensor, tensors):
    return tl.load(table + row * tensors + tensor)


@triton.jit
def _chunk_of(table, row, tensor, tensors, start):
    address = _field(table, row, tensor, tensors)
    return address.to(tl.pointer_type(tl.float32)) + start


@triton.jit
def _places(base, at, WIDE: tl.constexpr):
    places = base + at
    if WIDE:
        places = tl.multiple_of(places, 16)  # alignment in bytes: gives four-word loads and stores
    return places


@triton.jit
def _read(base, at, left, WHOLE: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr):
    places = _places(base, at, WIDE)
    if WHOLE:
        return tl.load(places, eviction_policy=KEEP)
    else:  # noqa: RET505  (without it Triton would compile the second return too)
        return tl.load(places, mask=at < left, other=0.0, eviction_policy=KEEP)


@triton.jit
def _write(base, at, value, left, WHOLE: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr):
    places = _places(base, at, WIDE)
    if WHOLE:
        tl.store(places, value, eviction_policy=KEEP)
    else:
        tl.store(places, value, mask=at < left, eviction_policy=KEEP)


@triton.jit
def _report(counters, sums, tensor, tensors, chunks, first, own_chunks, weight, update, at):
    """Store the sums of squares of a chunk; return True for the last chunk of this parameter."""
    tl.store(sums + first + at, weight)
    tl.store(sums + chunks + first + at, update)
    tl.debug_barrier()  # the stores of all threads must precede the atomic add
    return tl.atomic_add(counters + ARRIVED + tensor, 1) == own_chunks - 1


@triton.jit
def _sum_in_order(counters, sums, tensor, tensors, chunks, first, own_chunks, adaptive, coeff, decay, eps):
    """Compute and publish the trust ratio of a parameter; the squares of its chunks are added in a fixed order."""
    weight = tl.zeros([256], tl.float32)
    update = tl.zeros([256], tl.float32)
    for start in range(0, own_chunks, 256):
        at = start + tl.arange(0, 256)
        weight += tl.load(sums + first + at, mask=at < own_chunks, other=0.0, cache_modifier=".cg")
        update += tl.load(sums + chunks + first + at, mask=at < own_chunks, other=0.0, cache_modifier=".cg")
    weight_norm = tl.sqrt(tl.sum(weight))
    update_norm = tl.sqrt(tl.sum(update))
    trusted = (weight_norm > 0) & (update_norm > 0) & (adaptive != 0)
    ratio = tl.where(trusted, coeff * weight_norm / (update_norm + decay * weight_norm + eps), 1.0)
    tl.store(sums + 2 * chunks + tensor, ratio)
    tl.debug_barrier()
    tl.atomic_xchg(counters + ARRIVED + tensors + tensor, 1)


@triton.jit
def _ratio(counters, sums, tensor, tensors, chunks):
    while tl.atomic_add(counters + ARRIVED + tensors + tensor, 0) == 0:
        pass
    return tl.load(sums + 2 * chunks + tensor, cache_modifier=".cg")


@triton.jit
def _lars_measure(
    p, g, left,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, WIDE_GRAD: tl.constexpr,
):  # fmt: skip
    weight = tl.zeros([BLOCK], tl.float32)
    update = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = _read(p, at, left, WHOLE, WIDE, "evict_last")
        grad = _read(g, at, left, WHOLE, WIDE_GRAD, "evict_last")
        weight += value * value
        update += grad * grad
    return tl.sum(weight), tl.sum(update)


@triton.jit
def _lars_apply(
    p, g, v, left, rate, momentum, decay,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, WIDE_GRAD: tl.constexpr,
):  # fmt: skip
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = _read(p, at, left, WHOLE, WIDE, "evict_first")
        grad = _read(g, at, left, WHOLE, WIDE_GRAD, "evict_first")
        speed = _read(v, at, left, WHOLE, WIDE, "evict_first")
        speed = momentum * speed + rate * (grad + decay * value)
        _write(v, at, speed, left, WHOLE, WIDE, "evict_first")
        _write(p, at, value - speed, left, WHOLE, WIDE, "evict_first")


@triton.jit(do_not_specialize=["tensors", "chunks", "items"])
def lars(
    table, work, sums, counters, tensors, chunks, items,
    lr, momentum, coeff, weight_decay, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WIDE_GRAD: tl.constexpr,
):  # fmt: skip
    item = tl.atomic_add(counters, 1, sem="relaxed")
    while item < items:
        tensor = tl.load(work + 2 * item) >> 1
        measuring = (tl.load(work + 2 * item) & 1) == 0
        at = tl.load(work + 2 * item + 1)
        start = at.to(tl.int64) * CHUNK
        left = _field(table, NUMEL, tensor, tensors) - start
        adaptive = _field(table, ADAPTIVE, tensor, tensors)
        p = _chunk_of(table, PARAM, tensor, tensors, start)
        g = _chunk_of(table, GRAD, tensor, tensors, start)
        if measuring:
            if left >= CHUNK:
                weight, update = _lars_measure(p, g, left, CHUNK, BLOCK, True, WIDE, WIDE_GRAD)
            else:
                weight, update = _lars_measure(p, g, left, CHUNK, BLOCK, False, WIDE, WIDE_GRAD)
            first = _field(table, FIRST_CHUNK, tensor, tensors).to(tl.int32)
            own_chunks = _field(table, CHUNKS, tensor, tensors).to(tl.int32)
            if _report(counters, sums, tensor, tensors, chunks, first, own_chunks, weight, update, at):
                _sum_in_order(
                    counters, sums, tensor, tensors, chunks, first, own_chunks, adaptive, coeff, weight_decay, eps
                )
        else:
            v = _chunk_of(table, FIRST_STATE, tensor, tensors, start)
            decay = tl.where(adaptive != 0, weight_decay, 0.0)
            rate = lr * _ratio(counters, sums, tensor, tensors, chunks)
            if left >= CHUNK:
                _lars_apply(p, g, v, left, rate, momentum, decay, CHUNK, BLOCK, True, WIDE, WIDE_GRAD)
            else:
                _lars_apply(p, g, v, left, rate, momentum, decay, CHUNK, BLOCK, False, WIDE, WIDE_GRAD)
        item = tl.atomic_add(counters, 1, sem="relaxed")


@triton.jit
def _lamb_update(value, mean, square, eps, decay, scale1, scale2):
    """Return m_hat / (sqrt(v_hat) + eps) + decay * w; the scales are 1 / (1 - beta^t)."""
    return (mean * scale1) / (tl.sqrt(square * scale2) + eps) + decay * value


@triton.jit
def _lamb_measure(
    p, g, m, v, left, beta1, beta2, rest1, rest2, eps, decay, scale1, scale2,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, WIDE_GRAD: tl.constexpr,
):  # fmt: skip
    weight = tl.zeros([BLOCK], tl.float32)
    length = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = _read(p, at, left, WHOLE, WIDE, "evict_last")
        grad = _read(g, at, left, WHOLE, WIDE_GRAD, "evict_first")
        mean = _read(m, at, left, WHOLE, WIDE, "evict_last")
        square = _read(v, at, left, WHOLE, WIDE, "evict_last")
        mean = beta1 * mean + rest1 * grad
        square = beta2 * square + rest2 * grad * grad
        _write(m, at, mean, left, WHOLE, WIDE, "evict_last")
        _write(v, at, square, left, WHOLE, WIDE, "evict_last")
        update = _lamb_update(value, mean, square, eps, decay, scale1, scale2)
        if not WHOLE:
            update = tl.where(at < left, update, 0.0)  # beyond the end it is 0/0 if eps is 0
        weight += value * value
        length += update * update
    return tl.sum(weight), tl.sum(length)


@triton.jit
def _lamb_apply(
    p, m, v, left, rate, eps, decay, scale1, scale2,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = _read(p, at, left, WHOLE, WIDE, "evict_first")
        mean = _read(m, at, left, WHOLE, WIDE, "evict_first")
        square = _read(v, at, left, WHOLE, WIDE, "evict_first")
        update = _lamb_update(value, mean, square, eps, decay, scale1, scale2)
        _write(p, at, value - rate * update, left, WHOLE, WIDE, "evict_first")


@triton.jit(do_not_specialize=["tensors", "chunks", "items"])
def lamb(
    table, work, sums, counters, tensors, chunks, items,
    lr, beta1, beta2, rest1, rest2, eps, weight_decay, scale1, scale2,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WIDE_GRAD: tl.constexpr,
):  # fmt: skip
    item = tl.atomic_add(counters, 1, sem="relaxed")
    while item < items:
        tensor = tl.load(work + 2 * item) >> 1
        measuring = (tl.load(work + 2 * item) & 1) == 0
        at = tl.load(work + 2 * item + 1)
        start = at.to(tl.int64) * CHUNK
        left = _field(table, NUMEL, tensor, tensors) - start
        adaptive = _field(table, ADAPTIVE, tensor, tensors)
        decay = tl.where(adaptive != 0, weight_decay, 0.0)
        p = _chunk_of(table, PARAM, tensor, tensors, start)
        m = _chunk_of(table, FIRST_STATE, tensor, tensors, start)
        v = _chunk_of(table, SECOND_STATE, tensor, tensors, start)
        if measuring:
            g = _chunk_of(table, GRAD, tensor, tensors, start)
            if left >= CHUNK:
                weight, update = _lamb_measure(
                    p, g, m, v, left, beta1, beta2, rest1, rest2, eps, decay, scale1, scale2,
                    CHUNK, BLOCK, True, WIDE, WIDE_GRAD,
                )  # fmt: skip
            else:
                weight, update = _lamb_measure(
                    p, g, m, v, left, beta1, beta2, rest1, rest2, eps, decay, scale1, scale2,
                    CHUNK, BLOCK, False, WIDE, WIDE_GRAD,
                )  # fmt: skip
            first = _field(table, FIRST_CHUNK, tensor, tensors).to(tl.int32)
            own_chunks = _field(table, CHUNKS, tensor, tensors).to(tl.int32)
            if _report(counters, sums, tensor, tensors, chunks, first, own_chunks, weight, update, at):
                _sum_in_order(counters, sums, tensor, tensors, chunks, first, own_chunks, adaptive, 1.0, 0.0, 0.0)
        else:
            rate = lr * _ratio(counters, sums, tensor, tensors, chunks)
            if left >= CHUNK:
                _lamb_apply(p, m, v, left, rate, eps, decay, scale1, scale2, CHUNK, BLOCK, True, WIDE)
            else:
                _lamb_apply(p, m, v, left, rate, eps, decay, scale1, scale2, CHUNK, BLOCK, False, WIDE)
        item = tl.atomic_add(counters, 1, sem="relaxed")
