"""The formats that a matrix keeps, and the kernel of each direction."""

from __future__ import annotations

import functools
from typing import Any

from rawops import _sparse_formats as formats
from rawops._runtime import arrays, checks, dtypes
from rawops._sparse_formats import Rows
from rawops._sparse_pack import PACKABLE
from rawops._sparse_packed import OWN_BYTES, ByPacked
from rawops._sparse_profile import Choice, Limits, Profile, candidates, choose, choose_scatter, profile
from rawops._sparse_spmm import Dense
from rawops._sparse_spmv import ByRows, Product, Scattered
from rawops._sparse_stream import ByStream
from rawops._sparse_transpose import transposed
from rawops.errors import UnsupportedError

_RESERVE = 0.8  # share of the free memory that "auto" lets the second format and its construction take
_BLOCK_COLUMNS = 28_928  # of several blocks, also where more would fit into shared memory
_ALWAYS = 2**28  # bytes that no device is asked for whether it has them
_ONE, _ZERO = (1.0, 0.0, 0), (0.0, 0.0, 0)  # factors as the kernels take them
_PRODUCTS = {"rows": ByRows, "stream": ByStream, "packed": ByPacked, "scatter": Scattered}


class Store:
    """What a matrix and its transposed views share: the formats, and the product of each direction.

    `rows[False]` are the compressed rows of A, `rows[True]` those of its transpose; `given` is the one that came in,
    made from the first of `data_size` entries.
    """

    def __init__(self, device, given: bool, rows: Rows, dual: bool, data_size: int, order=None, starts=None) -> None:
        self.device, self.given, self.order, self.starts = device, given, order, starts
        self.data_size = data_size
        self.derived_order: Any = None
        self.rows = {given: rows}
        if dual:
            self.rows[not given] = transposed(device, rows)
        self.profiles = {way: profile(device, kept) for way, kept in self.rows.items()}
        self.choices: dict[bool, Choice] = {}
        self.products: dict[bool, Product] = {}
        self.dense = {way: Dense(device, kept) for way, kept in self.rows.items()}
        self.tunings = 0  # so that whoever holds on to kernels, and their memory, knows of others
        self.updates = 0  # and whoever has made something of the values, of other values
        self.ready: dict[tuple, tuple[int, int]] = {}  # the sizes of x and y of calls that need no more checks
        for way in (False, True):
            if way in self.rows:
                self.use(way, choose(self.profiles[way], functools.partial(self.limits, way)))
            else:
                self.use(way, choose_scatter(self.profiles[not way]))

    def use(self, way: bool, choice: Choice) -> None:
        """Set the kernel of a direction."""
        kept = not way if choice.kernel == "scatter" else way
        self.choices[way] = choice
        product = _PRODUCTS[choice.kernel]
        self.products[way] = product(self.device, self.rows[kept], choice, self.profiles[kept])

    def limits(self, way: bool) -> Limits:
        """Return what a packed copy of a direction may be."""
        data = self.values.data
        shared = (self.device.max_shared_bytes - OWN_BYTES) // data.itemsize
        wanted = 2 * self.rows[way].nbytes
        has_room = wanted < _ALWAYS or wanted <= _RESERVE * _free_bytes(self.device)
        columns = min(shared - 1, _BLOCK_COLUMNS)
        return Limits(shared - 1, columns, has_room and dtypes.name(data.dtype) in PACKABLE)

    @property
    def values(self) -> Rows:
        return self.rows[self.given]

    def profile_of(self, way: bool) -> Profile:
        if way not in self.profiles:  # of the format that is not kept: from the column numbers of the other
            rows = self.rows[not way]
            xp = formats.module_of(rows.indices)
            indptr = formats.pointers(xp, rows.indices, rows.shape[1])
            found = profile(self.device, Rows(rows.data, rows.indices, indptr, rows.shape[::-1]), is_kept=False)
            self.profiles[way] = found._replace(bandwidth=self.profiles[not way].bandwidth)
        return self.profiles[way]

    def update(self, data) -> None:
        """Write other values into all formats, in place: captured graphs see them.

        What takes memory comes first: where there is none, nothing has changed.
        """
        values = self.values
        if len(self.rows) == 2 and self.derived_order is None:
            self.derived_order = formats.column_order(values)
        is_given = self.order is None
        data = data[: values.nnz] if is_given else formats.gather(self.device, data, self.order, self.starts)
        derived = formats.gather(self.device, data, self.derived_order) if len(self.rows) == 2 else None
        self.updates += 1
        values.data[...] = data
        if derived is not None:
            self.rows[not self.given].data[...] = derived
        for product in self.products.values():
            if isinstance(product, ByPacked):
                product.update()

    def tune(self) -> None:
        """Time a few kernels for each format and keep the fastest."""
        self.tunings += 1
        for way in [way for way, rows in self.rows.items() if rows.nnz]:
            kept = self.choices[way], self.products[way]
            try:
                self._tune(way)
            except BaseException:  # no memory, a Ctrl-C
                self.choices[way], self.products[way] = kept
                raise

    def _tune(self, way: bool) -> None:
        rows, times = self.rows[way], {}
        x, y = (self.device.empty((size,), rows.data.dtype) for size in rows.shape[::-1])
        x[...] = 0
        for choice in candidates(self.profiles[way], self.limits(way)):
            self.use(way, choice)
            run = functools.partial(self.products[way].run, x, y, _ONE, _ZERO, None, False)
            times[choice] = _elapsed(self.device, run)
        best = min(times, key=times.get)
        self.use(way, best._replace(why=f"fastest of {len(times)}, {times[best]:.3g} ms"))


def check_dual(function: str, dual) -> None:
    checks.choice(function, "dual", dual, (True, False, "auto"))


def is_dual(device, rows: Rows, dual) -> bool:
    """Decide whether the second format is made."""
    if dual != "auto":
        return bool(dual)
    sort_bytes = 2 * (8 + rows.data.itemsize) * rows.nnz
    return rows.nbytes + sort_bytes <= _RESERVE * _free_bytes(device)


def _free_bytes(device) -> float:
    if device.is_emulated:
        return float("inf")
    cupy = arrays.cupy_or_raise("SparseMatrix")
    with device.current():
        return cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()


def _elapsed(device, call, repeats: int = 5) -> float:
    """Return milliseconds a call after a first one, by events on the current stream."""
    if device.is_emulated:
        raise UnsupportedError(f"SparseMatrix.tune: needs a GPU, found {device}: the emulator models no time")
    cupy = arrays.cupy_or_raise("SparseMatrix.tune")
    call()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / repeats
