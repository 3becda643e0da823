"""Products with the packed copy of a matrix: which block of threads has which slices, and the launches."""

from __future__ import annotations

import heapq

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows
from rawops._sparse_memory import uploaded
from rawops._sparse_pack import PACKABLE, Packed
from rawops._sparse_profile import Choice, Profile
from rawops._sparse_spmv import CALL, Packer

PLAN = ParamStruct(
    "PackedPlan",
    **dict.fromkeys(("data", "columns", "places", "bases", "rows", "present", "pieces"), "pointer"),
    **dict.fromkeys(("sums", "tickets", "shares"), "pointer"),
    **dict.fromkeys(("slice_count", "piece_count", "width", "lane_bits"), "int32"),
)
_KINDS = {kind: f"rawops::k{kind.capitalize()}" for kind in ("shared", "direct", "near", "far")}


def _smoke(value: str, vector: str, kind: str, conjugate: bool = False) -> dict:
    return {"value": value, "vector": vector, "kind": _KINDS[kind], "conjugate": conjugate}


PACKED = KernelSpec(
    source="spmv_packed.cu",
    entry="rawops::spmv_packed",
    template=("value", "vector", "kind", "conjugate"),
    choices={
        "value": PACKABLE,
        "vector": PACKABLE,
        "kind": tuple(_KINDS.values()),
        "conjugate": (False, True),
    },
    smoke=(
        *(_smoke(v, v, kind) for v in ("float32", "float64") for kind in _KINDS),
        _smoke("float32", "float64", "shared"),
        _smoke("complex64", "complex64", "near", True),
        _smoke("complex128", "complex128", "shared", True),
        _smoke("complex128", "complex128", "far"),
    ),
    params=CALL,
)
SLICES = KernelSpec(
    source="spmv_slices.cu",
    entry="rawops::spmv_slices",
    template=("vector", "parts"),
    choices={"vector": PACKABLE, "parts": (1, 8)},
    smoke=({"vector": "float32", "parts": 1}, {"vector": "complex128", "parts": 8}),
    params=CALL,
)
# As in spmv_packed.cu: threads of a block, and blocks that an SM holds
_THREADS, _BLOCKED_THREADS = 256, 896
_BLOCKS_PER_SM = {4: 5, 8: 4, 16: 4}  # by the bytes of a value
OWN_BYTES = 1024  # of shared memory, that the kernel takes beside x


class ByPacked:
    """Slices of neighbouring rows that a warp reads side by side, and pieces of long rows.

    With x in shared memory and several blocks of columns, their sums are added up by a second kernel.
    """

    def __init__(self, device, rows: Rows, choice: Choice, found: Profile) -> None:
        self.device, self.rows = device, rows
        self.packed = packed = Packed(device, rows, choice, found)
        self._threads = _BLOCKED_THREADS if packed.width else _THREADS
        self._shares, self._grid = None, self._grid_size()
        if packed.blocks > 1:
            self._shares = self._share_out()
        rows_present = (packed.slots, 0) if packed.is_sorted else (0, packed.slots)
        addresses = packed.data, packed.columns, packed.places, packed.bases, *rows_present, packed.pieces
        workspace = packed.sums, packed.tickets, device.pointer(self._shares)
        sizes = packed.slice_count, packed.piece_count, packed.width, packed.lanes.bit_length() - 1
        self._plan = PLAN.pack(*addresses, *workspace, *sizes)
        self._parts_at_once = 8 if packed.blocks >= 8 else 1
        combined = -(-rows.shape[0] * self._parts_at_once // _THREADS)
        self.num_partials = self._grid + packed.cut if packed.blocks == 1 else combined
        self._pack, self._bound, self._parts = Packer(device, rows), {}, {}

    @property
    def kept(self) -> list:
        shares = [] if self._shares is None else [self._shares]
        return [*self.packed.kept, *shares, *self._parts.values()]

    def update(self) -> None:
        """Take the values of the format again."""
        self.packed.copy()

    def _grid_size(self) -> int:
        places = (self.packed.slice_count + self.packed.piece_count) * 32
        most = self.device.sm_count * (1 if self.packed.width else _BLOCKS_PER_SM[self.rows.data.itemsize])
        return max(1, min(-(-places // self._threads), most))

    def _share_out(self):
        """Deal blocks of threads out to the blocks of columns, by their work: as Share in spmv_packed.cu."""
        packed, count = self.packed, self.rows.shape[0]
        total = sum(packed.work)
        ranks = [max(1, self.device.sm_count * work // total) for work in packed.work]
        loads = [(-work / rank, b) for b, (work, rank) in enumerate(zip(packed.work, ranks, strict=True))]
        heapq.heapify(loads)
        for _ in range(self.device.sm_count - sum(ranks)):
            b = loads[0][1]  # the fullest
            ranks[b] += 1
            heapq.heapreplace(loads, (-packed.work[b] / ranks[b], b))
        self._grid = sum(ranks)
        table, first, piece = [], 0, 0
        for b, (rank, pieces) in enumerate(zip(ranks, packed.block_pieces, strict=True)):
            sizes = b * packed.per_block, packed.per_block, first, rank
            table.append((b * packed.width, b * count, piece, pieces, *sizes))
            first, piece = first + rank, piece + pieces
        shares = np.array(table, np.int32).repeat(ranks, axis=0)
        shares[:, 6] = np.arange(self._grid) - shares[:, 6]
        return uploaded(self.device, shares)

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool, early: bool = False) -> None:
        kernel, end, parts, shared_bytes = self._bound.get((x.dtype, conjugate)) or self._bind(x, conjugate)
        grid, threads = (self._grid, 1, 1), (self._threads, 1, 1)
        if end is None:
            kernel.launch(grid, threads, (self._pack(x, y, alpha, beta, partials), self._plan), shared_bytes, early)
            return
        kernel.launch(grid, threads, (self._pack(x, parts, alpha, beta, None), self._plan), shared_bytes, early)
        values = self._pack(x, y, alpha, beta, partials), self.device.pointer(parts), self.packed.blocks
        end.launch((self.num_partials, 1, 1), (_THREADS, 1, 1), values, early=early)

    def _bind(self, x, conjugate: bool) -> tuple:
        """Load the kernels for a type of x and y."""
        packed, end, parts, kind = self.packed, None, None, self.packed.kind
        value, vector = dtypes.name(self.rows.data.dtype), dtypes.name(x.dtype)
        shared_bytes = (packed.width + 1) * x.dtype.itemsize if packed.width else 0
        if shared_bytes > self.device.max_shared_bytes - OWN_BYTES:
            kind, shared_bytes = "direct", 0
        is_conjugated = conjugate and value.startswith("complex")
        kernel = PACKED.kernel(self.device, value=value, vector=vector, kind=_KINDS[kind], conjugate=is_conjugated)
        if packed.blocks > 1:
            end = SLICES.kernel(self.device, vector=vector, parts=self._parts_at_once)
            if x.dtype not in self._parts:
                self._parts[x.dtype] = self.device.empty((packed.blocks * self.rows.shape[0],), x.dtype)
            parts = self._parts[x.dtype]
        self._bound[x.dtype, conjugate] = bound = kernel, end, parts, shared_bytes
        return bound
