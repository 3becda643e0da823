"""Times on the GPU: CUDA-graph replays for kernels, a plain loop for what a call costs the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# A graph holds enough calls to last about this long, which hides the cost of its own launch.
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
        return cls(*(float(x) for x in np.percentile(samples, (20, 50, 80))))


def rotations(bytes_per_call: int) -> int:
    """How many sets of inputs to rotate through so that none is still in the L2 when its turn comes again."""
    import cupy

    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    return max(2, -(-3 * l2 // max(bytes_per_call, 1)))


def graph_times(call: Callable[..., object], inputs: Sequence[tuple], replays: int = 40) -> Timing:
    """Time `call(*inputs[i])`, with i going round, in replays of one CUDA graph.

    Parameters
    ----------
    call : callable
        Launches on CuPy's current stream, and neither synchronises nor allocates once it is warm.
    inputs : sequence of tuple
        Sets of arguments; see `rotations`.
    replays : int
        Number of graph launches that are timed, each on its own.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the inputs were made on another stream
    with stream:
        for arguments in inputs:
            call(*arguments)
        graph, calls = _capture(stream, call, inputs, len(inputs))
        graph.launch()
        once = _elapsed_us(stream, graph) / calls
        rounds = max(1, min(round(_REPLAY_US / once), _MAX_CALLS) // calls)
        graph, calls = _capture(stream, call, inputs, rounds * len(inputs))
        for _ in range(3):
            graph.launch()
        samples = [_elapsed_us(stream, graph) / calls for _ in range(replays)]
    return Timing.of(samples)


def host_cost(call: Callable[[], object], repeats: int = 500) -> Timing:
    """Time what a call takes of the host alone, the GPU's queue never full."""
    import cupy

    batch = 10
    samples = []
    for _ in range(repeats // batch):
        cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - start) / batch * 1e6)
    return Timing.of(samples)


def _capture(stream, call: Callable[..., object], inputs: Sequence[tuple], calls: int):
    stream.begin_capture()
    try:
        for i in range(calls):
            call(*inputs[i % len(inputs)])
    finally:
        graph = stream.end_capture()
    graph.upload()
    return graph, calls


def _elapsed_us(stream, graph) -> float:
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    graph.launch()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) * 1e3
