"""Real least-squares matrices out of Python packages that carry the data, where they are installed.

`power_grid` is the Jacobian of state estimation over a case of MATPOWER (package matpower): flows at both ends of every
branch, injections and voltages, by angles and voltages. `pose_graph` is that of a planar pose graph in gtsam's data.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
from scipy import sparse


def data_file(package: str, name: str) -> Path | None:
    """Return where a package keeps a file; None if it is not installed."""
    found = importlib.util.find_spec(package)
    path = Path(found.submodule_search_locations[0], name) if found else None
    return path if path is not None and path.exists() else None


def power_grid(path: Path) -> sparse.csr_matrix:
    """The Jacobian of a MATPOWER case at its stored voltages, rows (4 branches + 3 buses), columns (2 buses)."""
    text = path.read_text()
    base = float(re.search(r"mpc\.baseMVA\s*=\s*([\d.]+)", text)[1])
    bus, branch = _table(text, "bus"), _table(text, "branch")
    voltage = bus[:, 7] * np.exp(1j * np.radians(bus[:, 8]))
    ends = np.searchsorted(np.sort(bus[:, 0]), branch[:, :2].T)
    ends = np.argsort(bus[:, 0])[ends]
    to_ends, at_ends = _branch_admittances(branch, ends, len(bus))
    shunts = sparse.diags((bus[:, 4] + 1j * bus[:, 5]) / base)
    nodal = at_ends[0].T @ to_ends[0] + at_ends[1].T @ to_ends[1] + shunts
    powers = [_power_by_voltage(y, c, voltage) for y, c in zip(to_ends, at_ends, strict=True)]
    powers.append(_power_by_voltage(nodal, sparse.identity(len(bus)), voltage))
    rows = [sparse.hstack([part(by_angle), part(by_size)]) for by_angle, by_size in powers for part in (_real, _imag)]
    rows.append(sparse.hstack([sparse.csr_matrix((len(bus), len(bus))), sparse.identity(len(bus))]))
    return sparse.csr_matrix(sparse.vstack(rows))


def _table(text: str, name: str) -> np.ndarray:
    rows = re.search(rf"mpc\.{name} = \[\s*(.*?)\];", text, re.DOTALL)[1]
    return np.array([row.split(";")[0].split() for row in rows.strip().splitlines()], dtype=np.float64)


def _branch_admittances(branch, ends, buses: int) -> tuple[list, list]:
    """For both ends: the matrix from voltages to currents into the branches, and that which picks the bus."""
    count = np.arange(len(branch))
    in_service = branch[:, 10]
    series = in_service / (branch[:, 2] + 1j * branch[:, 3])
    charging = in_service * 0.5j * branch[:, 4]
    ratio = np.where(branch[:, 8] == 0, 1, branch[:, 8]) * np.exp(1j * np.radians(branch[:, 9]))
    picks = [sparse.csr_matrix((np.ones(len(branch)), (count, end)), shape=(len(branch), buses)) for end in ends]
    own = (series + charging) / abs(ratio) ** 2, series + charging
    other = -series / ratio.conj(), -series / ratio
    scaled = [(own[i], picks[i], other[i], picks[1 - i]) for i in range(2)]
    return [sparse.diags(a) @ p + sparse.diags(b) @ q for a, p, b, q in scaled], picks


def _power_by_voltage(admittance, at, voltage) -> tuple:
    """The derivatives of S = (at V) conj(Y V) by the angles and by the magnitudes of V."""
    current, here = sparse.diags((admittance @ voltage).conj()), sparse.diags(at @ voltage)
    whole, unit = sparse.diags(voltage), sparse.diags(voltage / abs(voltage))
    by_angle = 1j * (current @ at @ whole - here @ (admittance @ whole).conj())
    return by_angle, current @ at @ unit + here @ (admittance @ unit).conj()


def _real(x):
    return x.real


def _imag(x):
    return x.imag


def pose_graph(path: Path) -> sparse.csr_matrix:
    """The Jacobian of the odometry of a graph of poses (x, y, heading) at its stored poses, three rows an edge."""
    lines = [line.split() for line in path.read_text().splitlines()]
    poses = np.array([line[2:5] for line in lines if line[0] == "VERTEX2"], dtype=np.float64)
    edges = np.array([line[1:6] for line in lines if line[0] == "EDGE2"], dtype=np.float64)
    first, second = edges[:, :2].astype(np.int64).T
    step = poses[second, :2] - poses[first, :2]
    heading, measured = poses[first, 2], edges[:, 4]
    cos, sin = np.cos(heading + measured), np.sin(heading + measured)
    blocks = np.zeros((2, len(edges), 3, 3))  # by the second pose, and by the first
    blocks[0, :, 0], blocks[0, :, 1] = (np.stack(row, 1) for row in ((cos, sin, 0 * cos), (-sin, cos, 0 * cos)))
    blocks[0, :, 2, 2] = 1
    blocks[1] = -blocks[0]
    blocks[1, :, 0, 2] = -sin * step[:, 0] + cos * step[:, 1]
    blocks[1, :, 1, 2] = -cos * step[:, 0] - sin * step[:, 1]
    row = 3 * np.arange(len(edges))[:, None, None] + np.arange(3)[:, None]
    row = np.broadcast_to(row, blocks.shape)
    column = 3 * np.stack([second, first])[:, :, None, None] + np.arange(3)
    entries = blocks.ravel(), (row.ravel(), np.broadcast_to(column, blocks.shape).ravel())
    return sparse.csr_matrix(entries, shape=(3 * len(edges), 3 * len(poses)))
