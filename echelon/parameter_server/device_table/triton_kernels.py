# mypy: ignore-errors
"""Triton's kernels of a device table: find, claim, gather, and the sum of each id's gradients with the row's update.

Multiplications and additions are not fused, roots and quotients are rounded exactly, and every sum has the order of the
CPU table. The functions are in Triton's language, so no types are checked here.
"""

import triton
import triton.language as tl

#: Rules that ``update`` knows.
SGD, MOMENTUM, NESTEROV, ADAGRAD, ROW_ADAGRAD, ADAM = (tl.constexpr(number) for number in range(6))
#: Kinds of initial values, as in ``table.initial``.
NORMAL, CONSTANT = tl.constexpr(1), tl.constexpr(2)

_EMPTY = tl.constexpr(-1)
_COUNT = tl.constexpr((1 << 29) - 1)


@triton.jit
def mix(keys):
    words = keys.to(tl.uint64, bitcast=True)
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit
def _home(keys, size, low, span, scale, FREE_KEY: tl.constexpr):
    """Return the place at which the search for each key begins."""
    high = (mix(keys) >> 32).to(tl.int64) - low
    place = tl.where((high >= 0) & (high < span), (high * scale) >> 32, 0)
    return tl.where(keys == FREE_KEY, size, place)


@triton.jit
def _next(place, size):
    return tl.where(place + 1 >= size, 0, place + 1)


@triton.jit(do_not_specialize=["count", "size", "low", "span", "scale"])
def find(
    ids_at, keys_at, values_at, out_at, count, size, low, span, scale,
    FREE_KEY: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the value of each id, or with PLACES its place; EMPTY, or the place behind all, for an id without one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    wanted = tl.load(ids_at + at, mask=here, other=0)
    place = _home(wanted, size, low, span, scale, FREE_KEY)
    absent = tl.full((BLOCK,), _EMPTY, tl.int64)
    if PLACES:
        absent += size + 2
    found, going = absent, here
    while tl.max(going.to(tl.int32), 0) > 0:
        keys = tl.load(keys_at + place, mask=going, other=FREE_KEY)
        hit = going & (keys == wanted)
        if PLACES:
            found = tl.where(hit, place, found)
        else:
            found = tl.where(hit, tl.load(values_at + place, mask=hit, other=_EMPTY), found)
        going = going & (keys != wanted) & (keys != FREE_KEY)
        place = tl.where(going, _next(place, size), place)
    tl.store(out_at + at, found, mask=here)


@triton.jit(do_not_specialize=["count", "size", "low", "span", "scale"])
def claim(
    ids_at, keys_at, used_at, out_at, count, size, low, span, scale,
    FREE_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the place of each id, and give a free one to those that have none.

    atomic_cas takes no mask: lanes that have nothing to write aim at the spare place, whose key stays FREE_KEY.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    wanted = tl.load(ids_at + at, mask=here, other=0)
    place = _home(wanted, size, low, span, scale, FREE_KEY)
    taken, going = tl.zeros((BLOCK,), tl.int64), here
    free = tl.full((BLOCK,), FREE_KEY, tl.int64)
    while tl.max(going.to(tl.int32), 0) > 0:
        keys = tl.load(keys_at + place, mask=going, other=FREE_KEY)
        writes = going & (keys == FREE_KEY) & (wanted != FREE_KEY)
        if tl.max(writes.to(tl.int32), 0) > 0:
            aim = tl.where(writes, place, size + 1)
            before = tl.atomic_cas(keys_at + aim, free, tl.where(writes, wanted, FREE_KEY))
            taken += (writes & (before == FREE_KEY)).to(tl.int64)
            keys = tl.where(writes, tl.where(before == FREE_KEY, wanted, before), keys)
        tl.store(out_at + at, place, mask=going & (keys == wanted))
        going = going & (keys != wanted)
        place = tl.where(going, _next(place, size), place)
    tl.atomic_add(used_at, tl.sum(taken, 0))


@triton.jit
def first_weights(ids, columns, seed, low, span, top, KIND: tl.constexpr):
    """Return the initial weights of these ids, [ids, columns]."""
    half = ((columns >> 1) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    stream = mix((ids ^ seed).to(tl.int64))
    drawn = mix((stream[:, None] + half[None, :]).to(tl.int64, bitcast=True))
    odd = (columns & 1)[None, :] == 1
    if KIND == CONSTANT:
        first = tl.zeros(drawn.shape, tl.float32) + low.to(tl.float32)
    elif KIND == NORMAL:
        radius = tl.sqrt(-2.0 * tl.log(((drawn >> 32).to(tl.float64) + 1.0) * 2.3283064365386963e-10))
        angle = 6.283185307179586 * (drawn & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10
        first = (low + span * radius * tl.where(odd, tl.sin(angle), tl.cos(angle))).to(tl.float32)
    else:
        part = tl.where(odd, drawn >> 32, drawn & 0xFFFFFFFF) >> 8
        share = part.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        first = tl.minimum(share * span.to(tl.float32) + low.to(tl.float32), top.to(tl.float32))
    return first


@triton.jit(do_not_specialize=["count", "seed", "filled", "width"])
def gather(
    ids_at, slots_at, rows_at, first_at, out_at, count, seed, filled, width,
    DIM: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the first ``width`` floats of each row of ROW floats; an id without a row reads its initial values."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    here = at < count
    slots = tl.load(slots_at + at, mask=here, other=0)
    present = here & (slots >= 0)
    inside = (columns < width)[None, :]
    rows = tl.load(rows_at + slots[:, None] * ROW + columns[None, :], mask=present[:, None] & inside, other=0.0)
    absent = here & (slots < 0)
    if tl.max(absent.to(tl.int32), 0) > 0:
        ids = tl.load(ids_at + at, mask=absent, other=0)
        low, span, top, start = tl.load(first_at), tl.load(first_at + 1), tl.load(first_at + 2), tl.load(first_at + 3)
        first = first_weights(ids, columns, seed, low, span, top, KIND)
        state = tl.where(columns < DIM + filled, start.to(tl.float32), 0.0)
        first = tl.where((columns < DIM)[None, :], first, state[None, :])
        rows = tl.where(absent[:, None], first, rows)
    tl.store(out_at + at[:, None] * width + columns[None, :], rows, mask=here[:, None] & inside)


@triton.jit
def piece_sums(
    grads_at, order_at, starts_at, runs_at, ends_at, sums_at, number_at,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write the sum of one piece of a long run."""
    piece = tl.program_id(0)
    if piece < tl.load(number_at):
        columns = tl.arange(0, COLUMNS)
        inside = columns < DIM
        run = tl.load(runs_at + piece)
        end = tl.load(starts_at + run + 1)
        within = tl.load(ends_at + run) - piece  # pieces of this run from here on
        begin = tl.load(starts_at + run) + ((end - tl.load(starts_at + run) + PIECE - 1) // PIECE - within) * PIECE
        end = tl.minimum(end, begin + PIECE)
        total = tl.zeros((COLUMNS,), tl.float32)
        for place in range(begin, end):
            at = tl.load(order_at + place)
            total += tl.load(grads_at + at * DIM + columns, mask=inside, other=0.0)
        tl.store(sums_at + piece.to(tl.int64) * DIM + columns, total, mask=inside)


@triton.jit
def _mean_squares(grads, columns, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mean square of each row in four sums side by side; a sum over one number and zeros is that number."""
    squares = grads * grads
    lanes = tl.arange(0, 4)[None, :]
    sums = tl.zeros((BLOCK, 4), tl.float32)
    for group in range(DIM // 4):
        part = tl.where((columns // 4 == group)[None, :], squares, 0.0)
        sums += tl.sum(tl.reshape(part, (BLOCK, COLUMNS // 4, 4)), 1)
    for column in range(DIM // 4 * 4, DIM):
        single = tl.sum(tl.where((columns == column)[None, :], squares, 0.0), 1)
        sums += tl.where(lanes == 0, single[:, None], 0.0)
    first = tl.sum(tl.where(lanes == 0, sums, 0.0), 1) + tl.sum(tl.where(lanes == 1, sums, 0.0), 1)
    second = tl.sum(tl.where(lanes == 2, sums, 0.0), 1) + tl.sum(tl.where(lanes == 3, sums, 0.0), 1)
    return tl.div_rn(first + second, tl.full((BLOCK,), DIM, tl.float32))


@triton.jit
def _run_sums(
    grads_at, order_at, sums_at, ends_at, run, begin, length, columns, inside,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of each run's gradients: of its positions, or if it is long of its pieces, in their order."""
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    short = tl.where(length > PIECE, 0, length)
    for number in range(tl.max(short, 0)):
        going = number < short
        at = tl.load(order_at + begin + number, mask=going, other=0)
        total += tl.load(grads_at + at[:, None] * DIM + columns[None, :], mask=going[:, None] & inside, other=0.0)
    pieces = tl.where(length > PIECE, (length + PIECE - 1) // PIECE, 0)
    first = tl.load(ends_at + run, mask=pieces > 0, other=0) - pieces
    for number in range(tl.max(pieces, 0)):
        going = number < pieces
        at = (first + number)[:, None] * DIM + columns[None, :]
        total += tl.load(sums_at + at, mask=going[:, None] & inside, other=0.0)
    return total


@triton.jit
def _applied(
    rows_at, at, slot, weights, grads, columns, held, keep, old, new, start, rate, setting1, setting2, setting3,
    RULE: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the new weights, and write the new state."""
    if RULE == SGD:
        weights = weights - rate * grads
    elif RULE == MOMENTUM:
        velocity = setting1 * tl.load(rows_at + at + DIM, mask=old, other=0.0) + grads
        tl.store(rows_at + at + DIM, velocity, mask=keep)
        weights = weights - rate * velocity
    elif RULE == NESTEROV:
        velocity = setting1 * tl.load(rows_at + at + DIM, mask=old, other=0.0) + grads
        tl.store(rows_at + at + DIM, velocity, mask=keep)
        weights = weights - rate * (grads + setting1 * velocity)
    elif RULE == ADAGRAD:
        total = tl.load(rows_at + at + DIM, mask=old, other=0.0)
        total = tl.where(new[:, None], start, total) + grads * grads
        tl.store(rows_at + at + DIM, total, mask=keep)
        weights = weights - tl.div_rn(rate * grads, tl.sqrt_rn(total) + setting1)
    elif RULE == ROW_ADAGRAD:
        total = tl.load(rows_at + slot * ROW + DIM, mask=held & (new == 0), other=0.0)
        total = tl.where(new, start, total) + _mean_squares(grads, columns, DIM, COLUMNS, BLOCK)
        tl.store(rows_at + slot * ROW + DIM, total, mask=held)
        divisor = tl.sqrt_rn(total) + setting1
        weights = weights - tl.div_rn(tl.zeros_like(divisor) + rate, divisor)[:, None] * grads
    else:
        mean = tl.load(rows_at + at + DIM, mask=old, other=0.0)
        square = tl.load(rows_at + at + 2 * DIM, mask=old, other=0.0)
        mean = mean + (grads - mean) * setting1
        square = square + (grads * grads - square) * setting2
        tl.store(rows_at + at + DIM, mean, mask=keep)
        tl.store(rows_at + at + 2 * DIM, square, mask=keep)
        weights = weights - rate * tl.div_rn(mean, tl.sqrt_rn(square) + setting3)
    return weights


@triton.jit(do_not_specialize=["count", "seed", "filled", "seen"])
def update(
    ids_at, grads_at, order_at, starts_at, first_position_at, ends_at, sums_at, slots_at, new_at, before_at,
    rows_at, meta_at, first_at, count, seed, filled, seen, scale, rate, setting1, setting2, setting3,
    RULE: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of each run, initialize its row if it is new, apply the rule and mark the row as pushed."""
    if tl.load(starts_at + tl.program_id(0).to(tl.int64) * BLOCK) < count:
        run = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        columns = tl.arange(0, COLUMNS)
        here = run < count
        begin = tl.load(starts_at + run, mask=here, other=0)
        length = tl.where(here, tl.load(starts_at + run + 1, mask=here, other=0) - begin, 0)
        slot = tl.load(slots_at + run, mask=here, other=-1)
        held, inside = slot >= 0, (columns < DIM)[None, :]
        grads = _run_sums(
            grads_at, order_at, sums_at, ends_at, run, begin, tl.where(held, length, 0), columns, inside,
            DIM, COLUMNS, PIECE, BLOCK,
        ) * scale  # fmt: skip
        new = tl.load(new_at + run, mask=held, other=0) != 0
        start = tl.load(first_at + 3).to(tl.float32)
        at = slot[:, None] * ROW + columns[None, :]
        old = held[:, None] & inside & (new == 0)[:, None]
        keep = held[:, None] & inside
        weights = tl.load(rows_at + at, mask=old, other=0.0)
        if tl.max(new.to(tl.int32), 0) > 0:
            position = tl.load(first_position_at + run, mask=new, other=0)
            ids = tl.load(ids_at + position, mask=new, other=0)
            low, span, top = tl.load(first_at), tl.load(first_at + 1), tl.load(first_at + 2)
            weights = tl.where(new[:, None], first_weights(ids, columns, seed, low, span, top, KIND), weights)
        weights = _applied(
            rows_at, at, slot, weights, grads, columns, held, keep, old, new, start, rate, setting1, setting2, setting3,
            RULE, DIM, ROW, COLUMNS, BLOCK,
        )  # fmt: skip
        tl.store(rows_at + at, weights, mask=keep)
        pushed = tl.load(meta_at + slot * 2, mask=held & (new == 0), other=0) & _COUNT
        pushed = tl.where(new, tl.load(before_at + run, mask=new, other=0).to(tl.int32), pushed)
        pushed = tl.minimum(pushed + 1, _COUNT) | -2147483648
        tl.store(meta_at + slot * 2, pushed, mask=held)
        tl.store(meta_at + slot * 2 + 1, tl.zeros_like(pushed) + seen, mask=held)
