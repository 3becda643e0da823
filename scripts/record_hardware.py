"""Record what a Hopper GPU computes for every instruction family of tests/hardware.

The emulator is compared with the file this writes (tests/hardware/h200.npz). With --check nothing runs: every kernel
is compiled for every architecture it is meant for, which needs no GPU.
"""

import argparse
import datetime
import json
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from hardware.families import FAMILIES, HOPPER, RECORDED, Family  # noqa: E402

from rawops._runtime import compiler  # noqa: E402

_PATIENCE = 20.0  # seconds for one family, the start of a process included


def compile_all(archs: tuple[str, ...]) -> int:
    """Compile every kernel, into the disk cache too; returns the number of failures."""

    def failure(job: tuple[Family, str]) -> str:
        family, arch = job
        try:
            family.cuda_kernel().compile(arch)
        except Exception as error:
            return f"{family.name} for {arch}: {error}\n{getattr(error, 'log', '')[:2000]}"
        return ""

    jobs = [(family, arch) for family in FAMILIES for arch in family.archs if arch in archs]
    with ThreadPoolExecutor() as pool:
        failures = [text for text in pool.map(failure, jobs) if text]
    print("\n".join([*failures, f"{len(jobs)} kernels compiled, {len(failures)} failures"]))
    return len(failures)


def serve(pipe) -> None:
    """Run the families whose names come through `pipe` and answer with the output, or with what went wrong."""
    import cupy

    by_name = {family.name: family for family in FAMILIES}
    while True:
        family = by_name[pipe.recv()]
        try:
            pipe.send(family.run(cupy))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


class Runner:
    """Runs families in a process of its own, a fresh one after a failure: a faulting kernel ends a CUDA context."""

    def __init__(self) -> None:
        self._process = self._pipe = None

    def run(self, name: str) -> np.ndarray | str:
        """The output, or what went wrong."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(name)
            result = self._pipe.recv() if self._pipe.poll(_PATIENCE) else f"no answer in {_PATIENCE} s"
        except (EOFError, OSError) as error:
            result = f"the process died ({type(error).__name__})"
        if isinstance(result, str):
            self.stop()
        return result

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def record(path: Path) -> int:
    """Run everything on the current GPU and write what it computed; returns the number of failures."""
    compile_all(HOPPER)
    outcomes, runner = {}, Runner()
    for family in FAMILIES:
        outcomes[family.name] = runner.run(family.name)
    runner.stop()
    results = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, str)}
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    operands = {family.name: family.fingerprint() for family in FAMILIES if family.name in results}
    about = {**_about(), "operands": operands, "failed": failed}
    np.savez_compressed(path, about=np.array(json.dumps(about)), **results)
    print("\n".join(f"{name}: {why}" for name, why in failed.items()))
    print(f"{len(results)} families of {about['gpu']} in {path}, {path.stat().st_size} bytes; {len(failed)} failed")
    return len(failed)


def _about() -> dict:
    from cupy.cuda import runtime

    return {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "nvrtc": compiler.nvrtc_version(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compile only, no GPU needed")
    parser.add_argument("--out", type=Path, default=RECORDED, help="file to write (default: %(default)s)")
    arguments = parser.parse_args()
    return 1 if (compile_all(("sm_80", "sm_90a")) if arguments.check else record(arguments.out)) else 0


if __name__ == "__main__":
    sys.exit(main())
