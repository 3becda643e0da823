"""What the tests of LSMR share: systems whose singular values are known, and comparison with SciPy."""

import numpy as np
from scipy import sparse

import rawops

NORMS = ("normr", "normar", "norma", "conda", "normx")


def unchecked(device):
    """Yield the device without the emulator's checks, which double a solve's time; test_lsmr_kernels.py has them on."""
    if device.is_emulated:
        with rawops.emulate(check=False):
            yield device
    else:
        yield device


def system(rng, m, n, values=(1.0, 2.0, 4.0), rank=None, dtype="float64"):
    """A matrix with these singular values, in turn, which LSMR is done with after as many iterations, and some b."""

    def normal(*shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x

    rank = min(m, n) if rank is None else rank
    u, v = (np.linalg.qr(normal(size, rank))[0] for size in (m, n))
    a = (u * np.resize(values, rank)) @ v.conj().T
    return a.astype(dtype), normal(m).astype(dtype)


def assert_same(device, ours, expected, rtol=1e-7):
    """Everything that SciPy returns, with norms that are small by cancellation compared with those they cancel from."""
    x, istop, itn, *norms = expected
    assert (ours.istop, ours.itn) == (istop, itn)
    scale = {"normr": norms[0] + norms[2] * norms[4], "normar": norms[2] * (norms[0] + norms[2] * norms[4])}
    for name, value in zip(NORMS, norms, strict=True):
        np.testing.assert_allclose(getattr(ours, name), value, rtol=rtol, atol=rtol * scale.get(name, 0), err_msg=name)
    np.testing.assert_allclose(device.get(ours.x), x, rtol=rtol, atol=rtol * np.linalg.norm(x))


def put_all(device, **arguments):
    return {name: device.put(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def counted(a):
    """An operator that says how often it was called."""
    calls = {"matvec": 0, "rmatvec": 0}

    def matvec(x):
        calls["matvec"] += 1
        return a @ x

    def rmatvec(u):
        calls["rmatvec"] += 1
        return a.conj().T @ u

    return rawops.LinearOperator(a.shape, matvec, rmatvec, a.dtype), calls


def scattered(rng, m, n, dtype="float64"):
    """A sparse matrix that LSMR is done with in a few iterations, in SciPy's and in our form."""
    a = sparse.random_array((m, n), density=0.05, rng=rng, dtype=np.float64)
    a = (a + sparse.diags_array(np.full(min(m, n), 3.0), shape=(m, n))).tocsr()
    return (a + 1j * a.copy().multiply(0.3)).tocsr() if np.dtype(dtype).kind == "c" else a
