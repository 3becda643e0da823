"""Sparse matrices like those of the public collections, made by seeded generators in NumPy or CuPy.

Random numbers are splitmix64 of a counter, so a matrix has the same pattern from either module. Each function returns
a `Csr`; ``xp`` is ``numpy`` or ``cupy``. The defaults aim at the published statistics of the matrix in the docstring.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Csr(NamedTuple):
    """Compressed rows: float32 data, int32 indices in rising order, int32 indptr."""

    data: Any
    indices: Any
    indptr: Any
    shape: tuple[int, int]


# --- numbers and rows --------------------------------------------------------------------------------------------


def bits(xp, counter, seed: int):
    """Splitmix64 of a counter: 64 random bits for each entry."""
    z = counter.astype(xp.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64((seed * 0xD1B54A32D192ED03 + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(xp, count: int, seed: int):
    """Float64 numbers from 0 to 1."""
    return (bits(xp, xp.arange(count), seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _unique(xp, key):
    """Sorted, each once. NumPy's own goes through a hash table, which takes ten times as long."""
    key = xp.sort(key)
    return key[xp.concatenate([xp.ones(min(key.size, 1), bool), key[1:] != key[:-1]])]


def _compressed(xp, row, col, shape: tuple[int, int], seed: int) -> Csr:
    """Sort coordinates, drop what is double and draw values from -1 to 1."""
    key = _unique(xp, row.astype(np.int64) * shape[1] + col)
    return _from_keys(xp, key, (uniform(xp, key.size, seed) * 2 - 1).astype(np.float32), shape)


def _from_keys(xp, key, data, shape: tuple[int, int]) -> Csr:
    indptr = xp.searchsorted(key, xp.arange(shape[0] + 1) * np.int64(shape[1]))
    return Csr(data, (key % shape[1]).astype(np.int32), indptr.astype(np.int32), shape)


def _spread(xp, lengths) -> tuple:
    """For each entry of rows with these lengths: its row, and its place in the row."""
    ends = xp.cumsum(lengths)
    entry = xp.arange(int(ends[-1]))
    row = xp.searchsorted(ends, entry, side="right")
    return row, entry - (ends - lengths)[row]


def _lengths(xp, rows: int, quantiles: tuple[int, int, int, int], longest: int, mean: float, seed: int):
    """Row lengths with these quantiles at 0, 1/4, 1/2 and 3/4, and above them a Pareto tail that gives the mean."""
    u = (xp.arange(rows) + 0.5) / rows
    body = xp.interp(xp.minimum(u, 0.75), xp.asarray([0, 0.25, 0.5, 0.75]), xp.asarray(quantiles, np.float64))
    is_tail = u > 0.75
    v, start = xp.maximum((1 - u) / 0.25, 1e-12), max(quantiles[3], 1)
    need = mean * rows - float(body[~is_tail].sum())
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        total = float((xp.minimum(start * v**-middle, longest) * is_tail).sum())
        low, high = (middle, high) if total < need else (low, middle)
    found = xp.where(is_tail, xp.minimum(start * v**-low, longest), body)
    found = xp.clip(xp.floor(found + uniform(xp, rows, seed)), quantiles[0], longest).astype(np.int64)
    found[-1] = longest
    return found[xp.argsort(bits(xp, xp.arange(rows), seed + 1))]


def _irregular(xp, shape, lengths, *, hubs: float, local: float, width: int, seed: int) -> Csr:
    """Rows of these lengths: columns near the diagonal, popular ones (Zipf), and any, in these shares."""
    rows, cols = shape
    key, missing = xp.zeros(0, np.int64), lengths
    for attempt in range(12):  # draw anew what fell on a place that was taken
        row, _ = _spread(xp, missing)
        if row.size == 0:
            break
        s = seed + 1000 * attempt
        kind, w = uniform(xp, row.size, s), uniform(xp, row.size, s + 1)
        reach = xp.maximum(width << attempt, 4 * lengths[row])
        near = (row * (cols / rows)).astype(np.int64)
        near += xp.floor((uniform(xp, row.size, s + 2) + uniform(xp, row.size, s + 3) - 1) * reach).astype(np.int64)
        popular = xp.clip(xp.floor(cols**w).astype(np.int64) - 1, 0, cols - 1)
        popular = (bits(xp, popular, seed + 9) % np.uint64(cols)).astype(np.int64)
        anywhere = (w * cols).astype(np.int64)
        col = xp.where(kind < local, xp.clip(near, 0, cols - 1), xp.where(kind < local + hubs, popular, anywhere))
        col = xp.where(lengths[row] > cols // 8, anywhere, col)
        key = _unique(xp, xp.concatenate([key, row * cols + col]))
        missing = lengths - xp.bincount(key // cols, minlength=rows)
    return _from_keys(xp, key, (uniform(xp, key.size, seed) * 2 - 1).astype(np.float32), shape)


# --- grids -----------------------------------------------------------------------------------------------------------


def stencil(xp, sides=(114, 114, 115), points: int = 7, unknowns: int = 1, dropped: float = 0.0, seed: int = 1) -> Csr:
    """A grid of three dimensions with 7 or 27 neighbours a point. atmosmodl: 1,489,752 rows, mean 6.93, max 7."""
    nx, ny, nz = sides
    count = nx * ny * nz
    point = xp.arange(count)
    x, y, z = point % nx, point // nx % ny, point // (nx * ny)
    rows, cols = [], []
    for dz, dy, dx in np.ndindex(3, 3, 3):
        dx, dy, dz = dx - 1, dy - 1, dz - 1
        if points == 7 and abs(dx) + abs(dy) + abs(dz) > 1:
            continue
        inside = (x + dx >= 0) & (x + dx < nx) & (y + dy >= 0) & (y + dy < ny) & (z + dz >= 0) & (z + dz < nz)
        rows.append(point[inside])
        cols.append(point[inside] + dx + dy * nx + dz * nx * ny)
    row, col = xp.concatenate(rows), xp.concatenate(cols)
    if unknowns > 1:
        a = xp.arange(unknowns)
        zero = 0 * a
        row = (row[:, None, None] * unknowns + a[:, None] + zero).ravel()
        col = (col[:, None, None] * unknowns + zero[:, None] + a).ravel()
    if dropped:
        kept = (uniform(xp, row.size, seed + 5) >= dropped) | (row == col)
        row, col = row[kept], col[kept]
    return _compressed(xp, row, col, (count * unknowns, count * unknowns), seed)


def elasticity(xp, sides=(9, 9, 257), dropped: float = 0.073, seed: int = 2) -> Csr:
    """Hexahedra with three unknowns a node. cant: 62,451 rows, 4,007,383 entries, mean 64.2, max 78."""
    return stencil(xp, sides, 27, 3, dropped, seed)


def dense_row(xp, side: int = 100, seed: int = 3) -> Csr:
    """A 7-point grid whose middle row is full."""
    a = stencil(xp, (side, side, side), seed=seed)
    size = a.shape[0]
    row, _ = _spread(xp, xp.diff(a.indptr).astype(np.int64))
    full = xp.full(size, size // 2)
    return _compressed(xp, xp.concatenate([row, full]), xp.concatenate([a.indices, xp.arange(size)]), a.shape, seed)


# --- graphs and circuits ---------------------------------------------------------------------------------------------


def rmat(xp, scale: int = 16, edge_factor: int = 48, seed: int = 11) -> Csr:
    """A symmetrised R-MAT graph (.57 .19 .19). kron_g500-logn16: 65,536 rows, 4,912,469 entries, max 17,998."""
    edges, size = edge_factor << scale, 1 << scale
    row, col = xp.zeros(edges, np.int64), xp.zeros(edges, np.int64)
    for bit in range(scale):
        t = uniform(xp, edges, seed + bit)
        row = row * 2 + (t >= 0.76)
        col = col * 2 + (((t >= 0.57) & (t < 0.76)) | (t >= 0.95))
    loopless = row != col
    row, col = row[loopless], col[loopless]
    return _compressed(xp, xp.concatenate([row, col]), xp.concatenate([col, row]), (size, size), seed)


def web(xp, size: int = 1_000_005, longest: int = 4700, mean: float = 3.1055, seed: int = 4) -> Csr:
    """A web graph: webbase-1M has 3,105,536 entries, median 2, max 4,700 and a column of 28,685."""
    lengths = _lengths(xp, size, (1, 2, 2, 2), longest, mean, seed)
    return _irregular(xp, (size, size), lengths, hubs=0.35, local=0.6, width=200, seed=seed)


def circuit(xp, size: int = 682_862, drawn=(590_000, 395_000, 31_000), mean: float = 3.55, seed: int = 13) -> Csr:
    """A band with a few rows and columns that are nearly full. ASIC_680k: 3,871,773 entries, max 395,259.

    `drawn` entries are drawn for each full row and column, of which some fall on one place.
    """
    lengths = _lengths(xp, size, (1, 2, 3, 4), 400, mean, seed)
    band = _irregular(xp, (size, size), lengths, hubs=0.1, local=0.8, width=300, seed=seed)
    row, _ = _spread(xp, xp.diff(band.indptr).astype(np.int64))
    rows, cols = [row], [band.indices.astype(np.int64)]
    for i, length in enumerate(drawn):
        place = int(bits(np, np.array([i]), seed + 77)[0] % np.uint64(size))
        other = (bits(xp, xp.arange(length), seed + 100 + i) % np.uint64(size)).astype(np.int64)
        rows += [xp.full(length, place), other]
        cols += [other, xp.full(length, place)]
    return _compressed(xp, xp.concatenate(rows), xp.concatenate(cols), (size, size), seed)


def power_law(xp, size: int = 2_000_000, mean: float = 16, seed: int = 1) -> Csr:
    """Rows of Pareto lengths (1.3), columns that crowd at low numbers; the longest row has 1/20 of the columns."""
    lengths = xp.minimum(xp.maximum(uniform(xp, size, seed), 1e-12) ** (-1 / 1.3), max(size // 20, 1))
    lengths = xp.maximum(1, lengths * mean / lengths.mean()).astype(np.int64)
    row, _ = _spread(xp, lengths)
    col = (uniform(xp, row.size, seed + 1) ** 2 * size).astype(np.int64)
    return _compressed(xp, row, col, (size, size), seed)


# --- least squares and linear programmes ------------------------------------------------------------------------------


def set_cover(xp, rows: int = 4284, cols: int = 1_096_894, longest: int = 12, seed: int = 19) -> Csr:
    """Columns of one or two runs of rows. rail4284: 11,284,032 entries, mean row 2,634, max 56,182."""
    lengths = xp.clip(xp.rint(longest - 5.0 * uniform(xp, cols, seed) ** 3), 1, longest).astype(np.int64)
    start = xp.floor(rows * uniform(xp, cols, seed + 1) ** 2.2).astype(np.int64)
    col, place = _spread(xp, lengths)
    gap = (bits(xp, xp.arange(cols), seed + 2) % np.uint64(40)).astype(np.int64)
    row = (start[col] + place + (place > lengths[col] // 2) * gap[col]) % rows
    return _compressed(xp, row, col, (rows, cols), seed)


def rays(xp, rows: int = 306_136, radius: float = 11.38, per_row: int = 18, seed: int = 0) -> Csr:
    """Random lines through a ball of voxels. The 8kv of the LSMR article: 306,136 x 6,177, 5,588,894 entries.

    11kv (936,063 x 23,394, 19,747,202 entries): ``rays(xp, 936_063, 17.74, 21)``.
    """
    reach = math.ceil(radius)
    side = 2 * reach + 1
    g = xp.arange(-reach, reach + 1)
    inside = (g[:, None, None] ** 2 + g[:, None] ** 2 + g**2 <= radius**2).ravel()
    number = xp.cumsum(inside) - 1
    cols = int(number[-1]) + 1
    steps = np.linspace(-2 * radius, 2 * radius, int(4 * per_row / 1.33))
    point = _directions(xp, rows, seed) * (radius * uniform(xp, rows, seed + 6) ** (1 / 3))[:, None]
    direction = _directions(xp, rows, seed + 3)
    keys = []
    for first in range(0, rows, 50_000):
        part = slice(first, first + 50_000)
        place = xp.rint(point[part, None] + direction[part, None] * xp.asarray(steps)[:, None]).astype(np.int64) + reach
        fits = ((place >= 0) & (place < side)).all(-1)
        voxel = xp.where(fits, (place[..., 0] * side + place[..., 1]) * side + place[..., 2], 0)
        fits &= inside[voxel]
        row = xp.arange(first, first + place.shape[0])[:, None]
        keys.append((row * cols + number[voxel])[fits])
    drawn = xp.sort(xp.concatenate(keys))
    key = _unique(xp, drawn)
    hits = xp.diff(xp.append(xp.searchsorted(drawn, key), drawn.size))
    return _from_keys(xp, key, (hits * (steps[1] - steps[0])).astype(np.float32), (rows, cols))


def _directions(xp, count: int, seed: int):
    """Points of the unit sphere."""
    z = 2 * uniform(xp, count, seed) - 1
    angle, r = 2 * math.pi * uniform(xp, count, seed + 1), xp.sqrt(1 - z * z)
    return xp.stack([r * xp.cos(angle), r * xp.sin(angle), z], 1)


def tomography(xp, side: int = 256, angles: int = 360, detectors: int = 363) -> Csr:
    """Parallel-beam projections with the exact length of each ray in each pixel (Siddon)."""
    offset = xp.arange(detectors) + 0.5 - detectors / 2
    edges = xp.arange(side + 1) - side / 2
    keys, lengths = [], []
    for i in range(angles):
        cos, sin = math.cos(math.pi * i / angles), math.sin(math.pi * i / angles)
        cuts = [(edges - offset[:, None] * o) / d for o, d in ((cos, -sin), (sin, cos)) if abs(d) > 1e-12]
        t = xp.sort(xp.concatenate(cuts, 1), 1)
        length, middle = xp.diff(t, axis=1), (t[:, 1:] + t[:, :-1]) / 2
        x = xp.floor(offset[:, None] * cos - middle * sin + side / 2).astype(np.int64)
        y = xp.floor(offset[:, None] * sin + middle * cos + side / 2).astype(np.int64)
        inside = (length > 1e-9) & (x >= 0) & (x < side) & (y >= 0) & (y < side)
        row = (xp.arange(detectors) + i * detectors)[:, None]
        keys.append((row * side**2 + x + y * side)[inside])
        lengths.append(length[inside])
    key, data = xp.concatenate(keys), xp.concatenate(lengths)
    order = xp.argsort(key)
    return _from_keys(xp, key[order], data[order].astype(np.float32), (angles * detectors, side**2))


def bundle(xp, cameras: int = 49, points: int = 7776, observations: int = 31_843, seed: int = 17) -> Csr:
    """Bundle adjustment: two rows an observation, 9 camera and 3 point columns. Ladybug-49: 63,686 x 23,769.

    Dubrovnik-356 (2,510,536 x 683,394, 30,126,432 entries): ``bundle(xp, 356, 226_730, 1_255_268)``.
    """
    longest = min(cameras, max(8, cameras // 4))
    point, place = _spread(xp, _lengths(xp, points, (2, 2, 3, 5), longest, observations / points, seed))
    first = (bits(xp, xp.arange(points), seed + 3) % np.uint64(cameras)).astype(np.int64)
    camera = (first[point] + place + (uniform(xp, point.size, seed + 4) < 0.1) * 3) % cameras
    key = _unique(xp, camera * points + point)
    camera, point = key // points, key % points
    cols = [camera[:, None] * 9 + xp.arange(9), 9 * cameras + point[:, None] * 3 + xp.arange(3)]
    col = xp.repeat(xp.concatenate(cols, 1), 2, axis=0).ravel()
    indptr = xp.arange(0, col.size + 1, 12).astype(np.int32)
    data = (uniform(xp, col.size, seed) * 2 - 1).astype(np.float32)
    return Csr(data, col.astype(np.int32), indptr, (2 * key.size, 9 * cameras + 3 * points))


def hub_column(xp, rows: int = 1_748_122, cols: int = 62_729, share: float = 0.9641, seed: int = 23) -> Csr:
    """Rows of 1 to 4 entries, one column in nearly all of them. sls: 6,804,304 entries, 1,685,394 in that column."""
    others = 1 + (uniform(xp, rows, seed) < 0.98) + (uniform(xp, rows, seed + 1) < 0.98)
    row, place = _spread(xp, others)
    near = row * cols // rows
    offset = xp.floor(uniform(xp, row.size, seed + 2) * 200 * (place + 1) ** 2).astype(np.int64)
    is_hub = uniform(xp, rows, seed + 3) < share
    hub = xp.flatnonzero(is_hub)
    col = xp.concatenate([(near + offset) % cols, xp.full(hub.size, cols // 3)])
    return _compressed(xp, xp.concatenate([row, hub]), col, (rows, cols), seed)
