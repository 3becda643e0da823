"""Times on the GPU: CUDA-graph replays for kernels, a plain loop for what a call costs the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# One replay lasts about this long, which hides the cost of its own launch.
_REPLAY_US = 1000.0
_MAX_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median and the spread of the replays."""

    p20: float
    median: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The percentiles of some samples."""
        return cls(*(float(x) for x in np.percentile(samples, (20, 50, 80))))


def rotations(bytes_per_call: int) -> int:
    """How many sets of inputs to go through so that none is still in the L2 when its turn comes again."""
    import cupy

    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    return max(2, -(-3 * l2 // max(bytes_per_call, 1)))


def graph_times(
    calls: Mapping[str, Callable[..., object]], inputs: Sequence[tuple], replays: int = 40
) -> dict[str, Timing]:
    """Time rivals side by side, each as replays of a CUDA graph of `call(*inputs[i])` with i going round.

    The replays alternate between the rivals, so that a card that warms up or throttles does so for all of them.

    Parameters
    ----------
    calls : mapping of str to callable
        Each launches on CuPy's current stream, does not synchronise, and may allocate from CuPy's pool.
    inputs : sequence of tuple
        Sets of arguments; see `rotations`.
    replays : int
        Number of graph launches a rival, each timed on its own.
    """
    import cupy

    cupy.cuda.Device().synchronize()  # the inputs were made on another stream
    with cupy.cuda.Stream(non_blocking=True):
        graphs, samples = {}, {}
        for name, call in calls.items():
            for arguments in inputs:
                call(*arguments)
            once = _elapsed_us(_capture(call, inputs)) / len(inputs)
            rounds = max(1, min(round(_REPLAY_US / once), _MAX_CALLS) // len(inputs))
            graphs[name] = _capture(call, [*inputs] * rounds), rounds * len(inputs)
            samples[name] = []
        for _ in range(replays):
            for name, (graph, count) in graphs.items():
                samples[name].append(_elapsed_us(graph) / count)
    return {name: Timing.of(found) for name, found in samples.items()}


def loop_times(
    calls: Mapping[str, Callable[..., object]], inputs: Sequence[tuple], loops: int = 15
) -> dict[str, Timing]:
    """Time rivals side by side as loops of calls from Python, of about `_REPLAY_US`, between two events.

    What is longer counts: the host's part of a call, or the device's. Parameters are those of `graph_times`.
    """
    import cupy

    samples: dict[str, list[float]] = {name: [] for name in calls}
    rounds = {}
    for name, call in calls.items():
        _loop_us(cupy, call, inputs, 1)
        rounds[name] = max(1, min(round(_REPLAY_US / _loop_us(cupy, call, inputs, 1)), _MAX_CALLS) // len(inputs))
    for _ in range(loops):
        for name, call in calls.items():
            samples[name].append(_loop_us(cupy, call, inputs, rounds[name]))
    return {name: Timing.of(found) for name, found in samples.items()}


def _loop_us(cupy, call: Callable[..., object], inputs: Sequence[tuple], rounds: int) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(rounds):
        for arguments in inputs:
            call(*arguments)
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) * 1e3 / (rounds * len(inputs))


def host_cost(call: Callable[[], object], batches: int = 50, batch: int = 10) -> Timing:
    """Time what a call takes of the host alone: batches small enough that the GPU's queue is never full."""
    import cupy

    samples = []
    for _ in range(batches):
        cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - start) / batch * 1e6)
    return Timing.of(samples)


def _capture(call: Callable[..., object], inputs: Sequence[tuple]):
    """A graph of one call for each set of inputs, launched once already."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    try:
        for arguments in inputs:
            call(*arguments)
    finally:
        graph = stream.end_capture()
    graph.launch()
    return graph


def _elapsed_us(graph) -> float:
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    graph.launch()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) * 1e3
