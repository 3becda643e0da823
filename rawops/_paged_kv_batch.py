"""Block table, lengths and positions of some sequences on the device, brought up to date by what has changed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rawops._paged_kv_allocator import PageAllocator, Sequence
from rawops._runtime.kernel import KernelSpec, ParamStruct

_CHANGES = 64  # of one launch: kChanges in paged_update.cu
_MANY = 8 * _CHANGES  # from here on the whole table is copied instead
_CHANGE = ("row", "length", "position", "column", "page")

PARAMS = ParamStruct(
    "UpdateParams",
    **dict.fromkeys(("seq_lens", "positions", "block_table"), "pointer"),
    table_stride="int64",
    count="int32",
    **{f"{name}_{i}": "int32" for i in range(_CHANGES) for name in _CHANGE},
)
KERNEL = KernelSpec(
    source="paged_update.cu", entry="rawops::paged_update", template=(), choices={}, smoke=[{}], params=PARAMS
)
_PADDING = (0,) * len(_CHANGE)


class Batch:
    """Device buffers for a fixed choice of sequences.

    Attributes
    ----------
    seq_lens, positions : int32 array (batch_size,)
        The length of each sequence, and the position of its last token.
    block_table : int32 array (batch_size, max_pages)
        -1 where there is no page.
    prefix : int32 array (3,)
        0, batch_size, and the tokens in `shared_pages`, once that was asked for.
    """

    def __init__(self, device, names: tuple[int, ...], max_pages: int) -> None:
        self.names, self._device = names, device
        self.seq_lens, self.positions = (device.empty((len(names),), "int32") for _ in range(2))
        self.block_table = device.empty((len(names), max_pages), "int32")
        self.prefix = device.empty((3,), "int32")
        self._seen: list[tuple[int, int, int]] | None = None  # of each row: length, pages and replacements
        self._shared: tuple[int, int] | None = None  # replacements in all rows, and the pages that all begin with

    def choose(self, names: tuple[int, ...]) -> None:
        """Turn to other sequences, as many as before."""
        if names != self.names:
            self.names = names
            self.outdate()

    def outdate(self) -> None:
        """Have the next update copy everything."""
        self._seen, self._shared = None, None

    def shared_pages(self, allocator: PageAllocator) -> int:
        """Return how many full pages all sequences begin with. Only a replaced page can change it."""
        sequences = [allocator[name] for name in self.names]
        replaced = sum(len(s.replaced) for s in sequences)
        if self._shared is None or self._shared[0] != replaced:
            full = min((s.length for s in sequences), default=0) // allocator.page_size
            count = 0
            while count < full and len({s.pages[count] for s in sequences}) == 1:
                count += 1
            self._shared = replaced, count
            copy_to_device(self.prefix, np.array([0, len(sequences), count * allocator.page_size], np.int32))
        return self._shared[1]

    def update(self, sequences: list[Sequence]) -> None:
        """Bring the buffers to what the allocator has under `names`, in the order of the current stream."""
        if self._seen is None:
            self._copy_all(sequences)
        else:
            changes = list(self._changes(sequences))
            if len(changes) > _MANY:
                self._copy_all(sequences)
            else:
                for start in range(0, len(changes), _CHANGES):
                    self._launch(changes[start : start + _CHANGES])
        self._seen = [(s.length, len(s.pages), len(s.replaced)) for s in sequences]

    def _changes(self, sequences: list[Sequence]) -> Iterator[tuple[int, ...]]:
        for row, (sequence, (length, pages, replaced)) in enumerate(zip(sequences, self._seen, strict=True)):
            now = (row, sequence.length, sequence.length - 1)
            columns = [*sequence.replaced[replaced:], *range(pages, len(sequence.pages))]
            for column in columns:
                yield (*now, column, sequence.pages[column])
            if not columns and sequence.length != length:
                yield (*now, -1, 0)

    def _launch(self, changes: list[tuple[int, ...]]) -> None:
        pointer = self._device.pointer
        flat = [x for change in (*changes, *[_PADDING] * (_CHANGES - len(changes))) for x in change]
        packed = PARAMS.pack(
            *map(pointer, (self.seq_lens, self.positions, self.block_table)),
            self.block_table.shape[1],
            len(changes),
            *flat,
        )
        KERNEL.kernel(self._device).launch((1, 1, 1), (_CHANGES, 1, 1), (packed,))

    def _copy_all(self, sequences: list[Sequence]) -> None:
        table = np.full(self.block_table.shape, -1, np.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages)] = sequence.pages
        lens = np.array([s.length for s in sequences], np.int32)
        for target, values in ((self.block_table, table), (self.seq_lens, lens), (self.positions, lens - 1)):
            if target.size:
                copy_to_device(target, values)


def copy_to_device(target, values: np.ndarray) -> None:
    """Copy a host array into a contiguous device array, in the order of the current stream."""
    if isinstance(target, np.ndarray):
        target[...] = values
    else:
        import cupy

        target.set(np.ascontiguousarray(values), stream=cupy.cuda.get_current_stream())
