"""`PagedKVCache`: a pool of pages, the sequences that live in it, and the calls that a serving loop makes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import replace

import numpy as np

from rawops import _paged_kv_cascade_sm90 as cascade_sm90
from rawops._attention_merge import merge_states
from rawops._paged_kv_allocator import Growth, PageAllocator, Sequence
from rawops._paged_kv_append import append
from rawops._paged_kv_attention import attend, attend_to_prefix, named_options
from rawops._paged_kv_batch import Batch, copy_to_device
from rawops._paged_kv_pool import DTYPES, KV_DTYPES, LAYOUTS, MAX_HEAD_DIM, PAGE_SIZES, check_rows
from rawops._paged_kv_swap import HostCopies, SavedSequence
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.call import check_apart_once
from rawops._runtime.copies import NotCopied
from rawops._runtime.device import on_own_device
from rawops._runtime.workspace import Workspace

_MAX_BATCHES = 32
_NAME = "PagedKVCache"


class PagedKVCache(NotCopied, instead="Make a new one, and append the tokens; fork() shares those of a sequence."):
    """Keys and values of many sequences in one pool of pages.

    Parameters
    ----------
    num_pages, page_size : int
        `page_size` tokens a page, a power of two up to 256.
    num_kv_heads, head_dim : int
    dtype : {"float16", "bfloat16"}
        Of queries, and of the keys and values that are appended.
    kv_dtype : {"float8_e4m3fn", "float8_e5m2", "int8"}, optional
        Of the pool, if not `dtype`: half the memory, and half the time of a long decode. See `k_scale`.
    layout : {"NHD", "HND"}
        Pages are (2, page_size, num_kv_heads, head_dim), or (2, num_kv_heads, page_size, head_dim).
    max_length : int, optional
        The longest that a sequence may become, in tokens, rounded up to whole pages: the width of the block tables. By
        default all of the pool.
    prefix_sharing : bool
        Full pages whose tokens are known are remembered, also after their sequences are freed until their pages are
        needed, and a new sequence begins with those that fit: see `add_sequence`.

    Attributes
    ----------
    pages : array (num_pages, 2, page_size, num_kv_heads, head_dim)
        The pool: ``[:, 0]`` keys, ``[:, 1]`` values.
    num_free_pages : int
        Pages that can still be given out.
    k_scale, v_scale : float32 array (num_kv_heads,), or None
        With `kv_dtype`: the pool holds keys and values in units of these. 1 at first; fill them before the first
        append, for int8 with the largest magnitude over 127.

    Notes
    -----
    A sequence is a number, given by `add_sequence`, `fork` or `restore`. Which pages it has is decided on the host at
    once; what happens on the device is put on the current stream and not waited for. The first use of a choice of
    sequences copies their block table there, later ones only what changed, as arguments of a small launch. The calls
    of several threads are safe beside each other, and on one stream (or streams in an order) so is the memory.

    To capture a loop in a CUDA graph, see `step`.

    Examples
    --------
    >>> cache = rawops.PagedKVCache(1024, 16, 8, 128)                    # doctest: +SKIP
    >>> s = cache.add_sequence()                                         # doctest: +SKIP
    >>> cache.append(k, v, [s], counts=[len(k)])                         # doctest: +SKIP
    >>> out = cache.prefill(q, [s], cu_seqlens_q)                        # doctest: +SKIP
    >>> t = cache.fork(s)                                                # doctest: +SKIP
    >>> cache.append(k2, v2, [s, t]); out = cache.decode(q2, [s, t])     # doctest: +SKIP
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype="float16",
        kv_dtype=None,
        *,
        layout: str = "NHD",
        max_length: int | None = None,
        prefix_sharing: bool = False,
    ) -> None:
        num_pages = checks.int_range(_NAME, "num_pages", num_pages, 0, 2**31 - 1)
        checks.choice(_NAME, "page_size", page_size, PAGE_SIZES, "It is a power of two up to 256.")
        heads = checks.int_range(_NAME, "num_kv_heads", num_kv_heads, 1, 2**16)
        head_dim = checks.int_range(_NAME, "head_dim", head_dim, 1, MAX_HEAD_DIM)
        dtype = _dtype("dtype", dtype, DTYPES)
        kv_dtype = dtype if kv_dtype is None else _dtype("kv_dtype", kv_dtype, KV_DTYPES)
        if kv_dtype in DTYPES and kv_dtype != dtype:
            checks.fail(ValueError, _NAME, "kv_dtype", f"be {dtype}, None or an 8-bit type", kv_dtype)
        self._dtype = dtype
        self.layout = checks.choice(_NAME, "layout", layout, LAYOUTS)
        if max_length is None:
            max_length = min(num_pages * page_size, 2**30 - page_size)
        max_length = checks.int_range(_NAME, "max_length", max_length, 0, 2**30 - page_size)
        sharing = checks.flag(_NAME, "prefix_sharing", prefix_sharing)
        self._device = arrays.current_device(_NAME)
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        # CuPy neither makes nor copies arrays of float8: these are a view of bytes
        self._stored = self._device.empty(
            (num_pages, 2, *inner, head_dim), dtypes.numpy("uint8" if "float8" in kv_dtype else kv_dtype)
        )
        self.pages = self._stored.view(dtypes.numpy(kv_dtype))
        self.k_scale = self.v_scale = None
        if kv_dtype not in DTYPES:
            self.k_scale, self.v_scale = (self._device.empty((heads,), "float32") for _ in "kv")
            self.k_scale[...] = self.v_scale[...] = 1
        self.page_size, self.num_kv_heads, self.head_dim = page_size, heads, head_dim
        self._allocator = PageAllocator(num_pages, page_size, -(-max_length // page_size), sharing)
        self._lock = self._allocator.lock
        self._batches: OrderedDict[tuple[int, ...], Batch] = OrderedDict()
        self._steps: dict[int, Batch] = {}
        self._workspace = Workspace()
        self._host_copies = HostCopies(self._device)

    # --- sequences ---

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free_pages

    def add_sequence(self, tokens: Sized[int] = ()) -> int:
        """Start a sequence.

        Parameters
        ----------
        tokens : sequence of int, optional
            Its token ids, as far as known; of no use without `prefix_sharing`. It begins with the longest remembered
            prefix of them in whole pages, all but the last token at most: `length` tells how many keys it has already,
            and the others are to be appended. Their pages are remembered as they fill.
        """
        return self._allocator.add(tokens)

    def fork(self, sequence: int) -> int:
        """Start a sequence with all that another one has. Pages are shared until one of the two is appended to.

        It has the tokens that the other one holds, not those that it is still to get: tell `append` what it gets.
        """
        return self._allocator.fork(sequence)

    def free(self, sequence: int) -> None:
        """End a sequence. Pages that no other sequence has can be given out again."""
        with self._lock:
            self._allocator.free(sequence)
            for names in [names for names in self._batches if sequence in names]:
                del self._batches[names]

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._allocator[sequence].length

    # --- tokens ---

    @on_own_device
    def append(self, k, v, sequences: Sized[int], counts: Sized[int] | None = None, *, tokens=None) -> None:
        """Add keys and values at the ends of sequences.

        Parameters
        ----------
        k, v : array (total, num_kv_heads, head_dim)
            Of the cache's dtype, any strides; those of the first sequence come first.
        sequences : sequence of int
            All different.
        counts : sequence of int, optional
            How many tokens each sequence gets; one each by default.
        tokens : sequence of sequence of int, optional
            Their ids, for prefix sharing, where `add_sequence` was not told.

        Raises
        ------
        OutOfPagesError
            Nothing has been written or changed.

        Notes
        -----
        A page that is shared is copied before it is written, on the device.
        """
        function = f"{_NAME}.append"
        names = _names_of(function, sequences)
        given = (1,) * len(names)
        if counts is not None:
            given = tuple(
                checks.int_range(function, "counts", n, 0, 2**31 - 1) for n in _listed(function, "counts", counts)
            )
        self._check_new(function, k, v, names, given)
        if tokens is not None:
            tokens = self._told(function, tokens, given)
        with self._lock, self._extended(names, given, tokens) as growth:
            batch = self._batch(names)
            positions, sequence_ids = batch.positions, None
            if counts is not None:
                starts = np.repeat(np.array(growth.starts, np.int32), given)
                before = np.repeat(np.cumsum([0, *given])[:-1], given)
                positions = self._upload(starts + np.arange(len(starts)) - before)
                sequence_ids = self._upload(np.repeat(np.arange(len(names)), given))
            scales = self.k_scale, self.v_scale
            operands = (k, v, self.pages, batch.block_table, positions, sequence_ids, *scales, *[None] * 4)
            append(function, operands, self.layout)

    @on_own_device
    def decode(
        self, q, sequences: Sized[int], *, cascade: bool | None = None, out=None, return_lse: bool = False, **options
    ):
        """Attend from one query of each sequence to all its keys.

        Parameters
        ----------
        q : array (len(sequences), num_heads, head_dim)
        sequences : sequence of int
        cascade : bool, optional
            Read the pages that all sequences begin with once for all of them (Hydragen, Juravsky et al., 2024,
            arXiv:2402.05099): the queries attend to the common part together, to the rest each alone, and the two are
            merged. By default where that saves enough traffic. Not with `window`, `alibi_slopes` or `num_splits`.
        out, return_lse, **options
            As for `rawops.paged_attention`: `softmax_scale`, `window`, `softcap`, `alibi_slopes`, `num_splits`.

        Returns
        -------
        array (len(sequences), num_heads, head_dim), and with `return_lse` float32 (num_heads, len(sequences))
        """
        function = f"{_NAME}.decode"
        cascade = cascade if cascade is None else checks.flag(function, "cascade", cascade)
        names = _names_of(function, sequences)
        if cascade is not False and _may_cascade(options):
            with self._lock:
                batch = self._batch(names)
                pages = batch.shared_pages(self._allocator)
                beside = pages > 0 and self._overlaps(batch, pages * self.page_size, q)
                if pages and (cascade or self._saves(pages, q, batch, beside)):
                    return self._cascade(function, q, batch, pages, beside, out, return_lse, options)
        elif cascade:
            checks.fail(ValueError, function, "cascade", f"be False with any of {', '.join(_APART)}", cascade)
        return self._attend(function, q, names, None, out, return_lse, options)

    @on_own_device
    def prefill(self, q, sequences: Sized[int], cu_seqlens_q, *, out=None, return_lse: bool = False, **options):
        """Attend from the last queries of each sequence, causal and bottom-right: append their keys first.

        Parameters
        ----------
        q : array (total_q, num_heads, head_dim)
        sequences : sequence of int
        cu_seqlens_q : int32 array (len(sequences) + 1,), or a sequence of int
            Sequence i has the queries ``cu_seqlens_q[i] : cu_seqlens_q[i + 1]``, any number from 0 up.
        out, return_lse, **options
            As for `decode`.
        """
        function = f"{_NAME}.prefill"
        if isinstance(cu_seqlens_q, Sized):
            rows = [checks.int_range(function, "cu_seqlens_q", x, 0, 2**31 - 1) for x in cu_seqlens_q]
            if getattr(q, "ndim", None) == 3:  # else that is the mistake to name
                check_rows(function, rows, q.shape[0])
            cu_seqlens_q = self._upload(np.array(rows, np.int32))
        return self._attend(function, q, _names_of(function, sequences), cu_seqlens_q, out, return_lse, options)

    # --- tables ---

    @on_own_device
    def block_table(self, sequences: Sized[int]):
        """Return the pages of sequences, int32 (len(sequences), max_pages), -1 past the last.

        Later calls for the same sequences in the same order update it in place, unless 32 other choices came between.
        """
        with self._lock:
            return self._batch(_names_of(f"{_NAME}.block_table", sequences)).block_table

    @on_own_device
    def seq_lens(self, sequences: Sized[int]):
        """Return the lengths of sequences, int32 (len(sequences),); updated in place as `block_table` is."""
        with self._lock:
            return self._batch(_names_of(f"{_NAME}.seq_lens", sequences)).seq_lens

    @on_own_device
    def step(self, sequences: Sized[int], *, tokens: Sized[int] | None = None) -> tuple:
        """Make room for one more token in each sequence, for a captured graph to fill.

        The buffers that are returned are the same for every call with this number of sequences, whichever they are.
        Capture one launch of `append_paged_kv` and `paged_attention` with them, the cache's layout, and the scales if
        there are any; then for each token call `step` and replay the graph. Nothing is waited for.

        Parameters
        ----------
        sequences : sequence of int
        tokens : sequence of int, optional
            The new token of each sequence, for prefix sharing.

        Returns
        -------
        block_table : int32 array (len(sequences), max_pages)
        seq_lens : int32 array (len(sequences),)
            The new token included.
        positions : int32 array (len(sequences),)
            Where it goes.

        Raises
        ------
        OutOfPagesError
            Nothing has changed.
        """
        function = f"{_NAME}.step"
        names = _names_of(function, sequences)
        if tokens is not None:
            tokens = self._told(function, [[t] for t in _listed(function, "tokens", tokens)], (1,) * len(names))
        with self._lock, self._extended(names, (1,) * len(names), tokens):
            batch = self._steps.get(len(names))
            if batch is None:
                batch = self._steps[len(names)] = Batch(self._device, names, self._allocator.max_pages)
            batch.choose(names)
            batch.update([self._allocator[name] for name in names])
            return batch.block_table, batch.seq_lens, batch.positions

    # --- host memory ---

    @on_own_device
    def save(self, sequence: int) -> SavedSequence:
        """Copy a sequence to page-locked host memory, asynchronously. It stays in the cache until it is freed.

        Freeing it at once is right: what is later written to its pages comes after the copy on the stream.
        """
        with self._lock:
            state = self._allocator[sequence]
            stored = self._host_copies.to_host(self._stored, state.pages)
            data = stored.view(dtypes.numpy(dtypes.name(self.pages.dtype)))
            state = Sequence(state.pages[:], state.length, [], state.tokens[:])
            return SavedSequence(state.length, data, state, self.layout)

    @on_own_device
    def restore(self, saved: SavedSequence) -> int:
        """Start a sequence with what was saved, copied back asynchronously; `saved` can be used again.

        Raises
        ------
        OutOfPagesError
            Nothing has changed.
        """
        function = f"{_NAME}.restore"
        if not isinstance(saved, SavedSequence):
            checks.fail(TypeError, function, "saved", "be a SavedSequence", f"{saved!r} ({type(saved).__name__})")
        page = (*self.pages.shape[1:], dtypes.name(self.pages.dtype), self.layout)
        found = (*saved.data.shape[1:], dtypes.name(saved.data.dtype), saved.layout)
        if found != page:
            rule = f"have pages of shape, dtype and layout {page}, as this cache"
            checks.fail(ValueError, function, "saved", rule, found)
        growth, data = Growth(), saved.data.view(self._stored.dtype)
        with self._lock:
            try:
                name = self._allocator.import_sequence(saved.state, growth)
                self._host_copies.to_device(self._stored, self._allocator[name].pages, data)
            except BaseException:
                self._allocator.undo(growth)
                raise
            return name

    # --- parts ---

    def _check_new(self, function: str, k, v, names: tuple, counts: tuple) -> None:
        """Check what could fail after pages have been given out."""
        if len(counts) != len(names) or any(n < 0 for n in counts):
            rule = f"be {len(names)} numbers from 0 up, one a sequence"
            checks.fail(ValueError, function, "counts", rule, list(counts))
        checks.arrays_given(function, k=k, v=v)
        (k, v), _ = arrays.take(function, k=k, v=v)
        device = arrays.device_of(function, pages=self.pages, k=k, v=v)
        expected = (sum(counts), self.num_kv_heads, self.head_dim)
        for name, x in (("k", k), ("v", v)):
            checks.dtype(function, name, x, (self._dtype,), "Convert it to the cache's dtype.")
            checks.shape(function, name, x, expected, "It is (tokens, num_kv_heads, head_dim).")
        check_apart_once(function, device, {"k": k, "v": v, "pages": self.pages}, ("pages",))

    @staticmethod
    def _told(function: str, tokens, counts: tuple) -> list[tuple]:
        """Return the ids of new tokens, as many as counts say, or raise."""
        ids = [_listed(function, "tokens[i]", t) for t in _listed(function, "tokens", tokens)]
        if [len(t) for t in ids] != list(counts):
            rule = f"have {list(counts)} ids, as many as tokens are appended"
            checks.fail(ValueError, function, "tokens", rule, [len(t) for t in ids])
        return ids

    @contextlib.contextmanager
    def _extended(self, names: tuple, counts: tuple, tokens) -> Iterator[Growth]:
        """Make room for tokens; where what is to write them fails (a compile, a Ctrl-C), take it back."""
        growth = Growth()
        try:
            self._allocator.extend(names, counts, tokens, growth)
            for old, new in growth.copies:
                self._stored[new] = self._stored[old]
            yield growth
        except BaseException:
            self._allocator.undo(growth)
            for batch in (*self._batches.values(), *self._steps.values()):
                batch.outdate()  # it may have the pages that were taken back
            raise

    def _batch(self, names: tuple[int, ...]) -> Batch:
        """Return the buffers of sequences, up to date."""
        sequences = [self._allocator[name] for name in names]  # raises for 1.0, which would find the buffers of 1
        batch = self._batches.get(names)
        if batch is None:
            batch = self._batches[names] = Batch(self._device, names, self._allocator.max_pages)
            if len(self._batches) > _MAX_BATCHES:
                self._batches.popitem(last=False)
        self._batches.move_to_end(names)
        batch.update(sequences)
        return batch

    def _attend(self, function: str, q, names: tuple[int, ...], cu_seqlens_q, out, return_lse: bool, options: dict):
        slopes = options.pop("alibi_slopes", None)
        asked = named_options(function, options)
        with self._lock:
            batch = self._batch(names)
            operands = (q, self.pages, batch.block_table, batch.seq_lens, cu_seqlens_q, slopes)
            operands += (self.k_scale, self.v_scale, out)
            return attend(function, operands, asked, return_lse, self.layout, self._workspace)

    def _saves(self, pages: int, q, batch: Batch, beside: bool) -> bool:
        rows = cascade_sm90.rows_of(q, self.num_kv_heads)
        return cascade_sm90.saves(len(batch.names), rows, pages * self.pages[:1].nbytes, beside)

    def _overlaps(self, batch: Batch, common: int, q) -> bool:
        """Tell whether one launch reads a common prefix and the rest, as far as is known here."""
        own = [self._allocator[name].length - common for name in batch.names]
        sizes = self.num_kv_heads, self.head_dim, cascade_sm90.rows_of(q, self.num_kv_heads)
        return self.k_scale is None and cascade_sm90.overlaps(self._device, own, *sizes)

    def _cascade(self, function: str, q, batch: Batch, pages: int, beside: bool, out, return_lse: bool, options: dict):
        asked = named_options(function, options)
        asked = replace(asked, window=(asked.window[0],) * 2)  # the prefix is before all that causality hides
        return_lse = checks.flag(function, "return_lse", return_lse)
        if q is not None and out is not None:
            (queries, target), _ = arrays.take(function, q=q, out=out)
            checks.dtype(function, "out", target, (dtypes.name(queries.dtype),))
            checks.shape(function, "out", target, queries.shape)
            checks.output(function, "out", target)
            check_apart_once(function, self._device, {"out": target, "pages": self.pages}, ("out",))
        common = pages * self.page_size
        prefix, table, scales = batch.prefix, batch.block_table, (self.k_scale, self.v_scale)
        shared = (q, self.pages, table[:1, :pages], prefix[2:], prefix[:2], None, *scales, None)
        own = (q, self.pages, table[:, pages:], batch.seq_lens, None, None, *scales, out)
        parts = attend_to_prefix(function, shared, replace(asked, beside=beside), self.layout, self._workspace)
        after = replace(asked, skipped=common, beside=parts is not None and parts.pending is not None)
        if parts is not None:
            return attend(function, own, after, return_lse, self.layout, self._workspace, prior=parts)
        first = attend(function, shared, asked, True, self.layout, self._workspace)
        second = attend(function, (*own[:-1], None), after, True, self.layout, self._workspace)
        merged, lse = merge_states(function, *first, *second)
        if out is None:
            out = merged
        else:
            out[...] = merged
        return (out, lse) if return_lse else out

    def _upload(self, values: np.ndarray):
        target = self._device.empty(values.shape, "int32")
        if target.size:
            copy_to_device(target, values.astype(np.int32))
        return target


def _dtype(name: str, dtype, allowed: tuple[str, ...]) -> str:
    with contextlib.suppress(TypeError, ValueError):  # of what NumPy does not know
        dtype = dtypes.name(dtype)
    return checks.choice(_NAME, name, dtype, allowed)


def _listed(function: str, name: str, values) -> tuple:
    try:
        return tuple(values)
    except TypeError:
        checks.fail(TypeError, function, name, "be a sequence of int", f"{values!r} ({type(values).__name__})")


def _names_of(function: str, sequences) -> tuple[int, ...]:
    """Return the names of sequences as a key of dictionaries."""
    names = _listed(function, "sequences", sequences)
    try:
        hash(names)
    except TypeError:
        checks.fail(TypeError, function, "sequences", "be a sequence of int", repr(sequences))
    return names


def _may_cascade(options: dict) -> bool:
    window = options.get("window")
    others = all(options.get(name) is None for name in _APART[1:])
    return others and (window is None or (isinstance(window, (tuple, list)) and [*window] == [None, None]))


_APART = ("window", "alibi_slopes", "num_splits")  # what a cascade does not have
