"""The CPU's rules of linear algebra: bytes worked out by hand, and what the profiler finds with the MKL's LAPACK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from simulator.core.problem import Problem  # noqa: E402
from tests.torch.cpu_calls import CPU, faked_and_measured, peak, spec, told_and_found  # noqa: E402
from tracer.costs.rules_cpu.workspaces import cpu_events  # noqa: E402
from tracer.costs.signature import Signature, TensorSpec  # noqa: E402

aten = torch.ops.aten
SIZES = [(5, 9), (40, 33), (100, 70)]
BATCHES = [(), (2,), (2, 3)]


@pytest.fixture
def mkl() -> Iterator[None]:
    """The scratch of other libraries is another."""
    if not torch.backends.mkl.is_available():
        pytest.skip("the rules of scratch were read off the MKL")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def events(target: str, *args: Any, outputs: tuple[TensorSpec, ...]) -> Any:
    return cpu_events(Signature(target=f"aten.{target}.default", args=args, outputs=outputs), CPU)


def test_a_decomposition_overwrites_a_copy() -> None:
    # 64 x 64 floats are 16,384 bytes; it lies in rows, so it is transposed through a tile of 3,600 floats.
    a = spec(64, 64)
    found = events("_linalg_svd", a, False, True, outputs=(a, spec(64), a))
    assert found == (16384, 256, 16384, 4, 16384, 14400, -14400, -16384, -4)
    columns = spec(64, 64, turned=True)
    found = events("_linalg_svd", columns, False, True, outputs=(a, spec(64), a))
    assert found == (16384, 256, 16384, 4, 16384, -16384, -4)


def test_eigenvectors_take_twice_the_matrix_as_scratch() -> None:
    # 2 * 64 * 64 + 6 * 64 + 2 floats and 5 * 64 + 3 integers.
    a = spec(64, 64)
    assert events("_linalg_eigh", a, "L", True, outputs=(spec(64), a)) == (
        256, 16384, 4, 34312, 1292, -1292, -34312, -4,
    )  # fmt: skip
    # Without them 22 * 64 + 1 floats and an integer, and a copy of the matrix.
    assert events("_linalg_eigh", a, "L", False, outputs=(spec(64), spec(0))) == (
        256, 16384, 14400, -14400, 4, 5636, 4, -4, -5636, -4, -16384,
    )  # fmt: skip


def test_an_inverse_has_factors_and_pivots_beside_it() -> None:
    # Three matrices of 8 x 8 floats; 3 * 8 pivots as integers, and a byte each when they are checked.
    a = spec(3, 8, 8)
    codes = spec(3, dtype="int32")
    assert events("linalg_inv_ex", a, outputs=(a, codes)) == (768, 12, 768, 96, 24, -24, -96, -768)


def test_complex_matrices_have_no_rule() -> None:
    a = spec(8, 8, dtype="complex64")
    assert events("_linalg_svd", a, False, True, outputs=(a, spec(8), a)) is None


def calls(batch: tuple[int, ...], n: int, m: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls on matrices that lie in rows and in columns, square, high and wide."""
    a, w, v = torch.randn(*batch, n, n), torch.randn(*batch, n, m), torch.randn(*batch, n)
    symmetric = a @ a.mT + n * torch.eye(n)
    out: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def add(op: Any, *args: Any, **kwargs: Any) -> None:
        out.append((op.default if hasattr(op, "default") else op, args, kwargs))

    def both(x: Any) -> list[Any]:
        return [x, x.mT.contiguous().mT]

    bounds = {"atol": torch.tensor(0.0), "rtol": torch.tensor(1e-5)}
    for x in (*both(a), *both(w), *both(w.mT)):
        for full, vectors in ((True, True), (False, True), (False, False)):
            add(aten._linalg_svd, x, full, vectors)
        for mode in ("reduced", "complete", "r"):
            add(aten.linalg_qr, x, mode)
        add(aten.geqrf, x)
        if x.shape[-2] >= x.shape[-1]:
            add(aten.linalg_householder_product, x, x[..., 0, :])
        add(aten.linalg_lu, x)
        factors, pivots, _ = aten.linalg_lu_factor_ex.default(x)
        add(aten.linalg_lu_factor_ex, x)
        for unpack in ((True, True), (False, True), (True, False)):
            add(aten.lu_unpack, factors, pivots, *unpack)
        add(aten.linalg_pinv.atol_rtol_tensor, x, **bounds)
        add(aten._euclidean_dist, x, torch.cat([x, x], -2))
    for x in both(a):
        factors, pivots, _ = aten.linalg_lu_factor_ex.default(x)
        add(aten.linalg_eig, x)
        add(aten.linalg_inv_ex, x)
        add(aten._linalg_det, x)
        add(aten._linalg_slogdet, x)
        add(aten.linalg_matrix_exp, x)
        add(aten._linalg_solve_ex, x, v)
        for y in both(w):
            add(aten._linalg_solve_ex, x, y)
            add(aten._linalg_solve_ex, x, y.mT, left=False)
            add(aten.linalg_lu_solve, factors, pivots, y, adjoint=True)
    for x in both(symmetric):
        add(aten._linalg_eigh, x, "L", True)
        add(aten._linalg_eigh, x, "L", False)
        add(aten.linalg_cholesky_ex, x)
        add(aten.cholesky_inverse, x)
        add(aten.linalg_pinv.atol_rtol_tensor, x, **bounds, hermitian=True)
        for y in both(w):
            add(aten.cholesky_solve, y, x)
            add(aten.linalg_solve_triangular, x, y, upper=False)
            add(aten.triangular_solve, y, x)
    return out


@pytest.mark.usefixtures("mkl")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_linear_algebra_as_the_profiler_finds_it(batch: tuple[int, ...], n: int, m: int) -> None:
    off = []
    for op, args, kwargs in calls(batch, n, m):
        told, found = told_and_found(op, *args, **kwargs)
        # A few scalars, as many as there are matrices.
        if abs(peak(told) - peak(found)) > 64 + peak(found) // 200:
            off.append((op, [tuple(x.shape) for x in args if hasattr(x, "shape")], told, found))
    assert off == []


class Decomposed(nn.Module):
    """A decomposition of a weight of n x n."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.eye(96) + torch.rand(96, 96) / 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight @ self.weight.mT
        if self.name == "inv":
            return torch.linalg.inv(w)[:1] @ x
        return getattr(torch.linalg, self.name)(w).sum() + x.sum()


@pytest.mark.usefixtures("mkl")
@pytest.mark.parametrize("name", ["svdvals", "eigvalsh", "inv", "matrix_exp", "det"])
def test_the_peak_of_a_step_with_linear_algebra(name: str) -> None:
    def make() -> tuple[Any, ...]:
        model = Decomposed(name)
        # Weights that grew to infinity would be raised to no power at all.
        return model, torch.randn(96, 2), lambda y: y.mean(), torch.optim.SGD(model.parameters(), lr=1e-9)

    told, found = (Problem(t).saved.timeline.peak_allocated_bytes for t in faked_and_measured(make))
    assert abs(told - found) <= found // 100
