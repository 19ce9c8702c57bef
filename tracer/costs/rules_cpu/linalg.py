"""Turn a call of linear algebra into the copies, factors and scratch that LAPACK's kernels take on a CPU.

LAPACK overwrites what it reads, in column-major order. So torch copies a matrix before it is factored, and an op that
leaves less than the factors holds them meanwhile (BatchLinearAlgebra.cpp, BatchLinearAlgebraKernel.cpp,
LinearAlgebra.cpp). Each rule restates what torch 2.13's profiler showed of it, float32, one thread, sizes 1 to 1,000,
with and without batches; how much scratch a routine asks for is the answer of the MKL in PyPI's x86 wheels.

Counts: copies, factors, permutations, LAPACK's scratch, the tile through which a matrix is transposed. Ignores: the
bytes in which errors are looked for; complex matrices; least squares, which no graph can hold; what contents decide:
the exponential of a matrix is told for the highest of its polynomials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tracer.costs.rules_cpu.layouts import FLOATS, Events, in_rows_or_columns, tile
from tracer.costs.rules_cpu.onednn import contiguous
from tracer.costs.signature import Signature, TensorSpec

Rule = Callable[[Signature], "Events | None"]
INT: Final = 4  # bytes of LAPACK's pivots and codes of errors
LONG: Final = 8


def _sizes(x: TensorSpec) -> tuple[int, int, int]:
    """How many matrices, of how many rows and columns."""
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]


def _made(signature: Signature) -> Events:
    return tuple(s.nbytes for s in signature.results if s.nbytes)


def _beside(signature: Signature, *inside: int) -> Events:
    """The outputs, then what is there together while the op runs."""
    return (*_made(signature), *_during(*inside))


def _during(*sizes: int) -> Events:
    took = tuple(n for n in sizes if n)
    return (*took, *(-n for n in reversed(took)))


def svd(signature: Signature) -> Events:
    """A copy of the matrix, overwritten (`svd_kernel`)."""
    x = signature.inputs[0]
    return _beside(signature, _sizes(x)[0] * INT, x.nbytes, tile(x))


def eigh(signature: Signature) -> Events:
    """The divide and conquer's scratch; without vectors, a copy of the matrix instead of them (`linalg_eigh_out`)."""
    x = signature.inputs[0]
    batch, n, _ = _sizes(x)
    if not x.elements:
        return _made(signature)
    with_vectors = len(_made(signature)) > 1
    copy = () if with_vectors else (x.nbytes, tile(x), -tile(x))
    scratch = _eigh_scratch(x, with_vectors=with_vectors)
    whole = (5 * n + 3) * INT if with_vectors else INT
    took = tuple(n for n in (*copy, batch * INT) if n)
    return (*_made(signature), *took, *_during(scratch, whole), -batch * INT, *((-x.nbytes,) if copy else ()))


def _eigh_scratch(x: TensorSpec, *, with_vectors: bool) -> int:
    """Bytes that `syevd` asks for."""
    n = x.shape[-1]
    if n < 2:
        return 2 * x.item_bytes
    rows = (22 if x.dtype == "float32" else 26) if n >= 16 else 3
    return (2 * n * n + 6 * n + 2 if with_vectors else rows * n + 1) * x.item_bytes


def eig(signature: Signature) -> Events:
    """The vectors as real numbers and a copy of the matrix (`linalg_eig_out`)."""
    x = signature.inputs[0]
    _, n, _ = _sizes(x)
    rows = (386 if n >= 16 else 34) if x.dtype == "float32" else 4
    values = signature.results[0].nbytes
    return _beside(signature, values, x.nbytes, x.nbytes, (rows * n + 1) * x.item_bytes)


def qr(signature: Signature) -> Events:
    """The reflectors' factors and scratch; without Q, a copy of a matrix that is higher than wide (`linalg_qr_out`)."""
    x = signature.inputs[0]
    batch, m, n = _sizes(x)
    k, mode = min(m, n), signature.argument(1, "mode", "reduced")
    factors, first, last = batch * k * x.item_bytes, *(s * x.item_bytes for s in _reflector_scratch(m, n))
    # The upper triangles of matrices that do not lie behind each other are copied once more.
    again = signature.results[1].nbytes if m > n and len(x.shape) > 2 and mode != "complete" else 0
    if mode == "r":
        if m <= n:
            return _beside(signature, factors, first)
        t = (tile(x), -tile(x)) if tile(x) else ()
        inside = (*_during(first), *_during(again))
        return (*_made(signature), factors, x.nbytes, *t, *inside, -x.nbytes, -factors)
    if mode == "complete":
        last = _product_scratch(m, m) * x.item_bytes
    return (*_made(signature), factors, *_during(first), *_during(again), *_during(last), -factors)


def _reflector_scratch(m: int, n: int) -> tuple[int, int]:
    """Elements that `geqrf` asks for, and `orgqr` for as many columns as there are reflectors."""
    k = min(m, n)
    wide = 1 if k < 32 or max(m, n) < 63 else 17 if k < 512 else 49 if k < 1000 else 65
    return wide * (n + 1), _product_scratch(m, k)


def _product_scratch(m: int, n: int) -> int:
    """Elements that `orgqr` asks for to make n columns of m rows."""
    wide = 1 if m < 32 else 16 if n <= 64 else 32 if n < 512 else 64
    return wide * n + 1


def reflectors(signature: Signature) -> Events:
    """`geqrf`: the reflectors, their factors, and scratch."""
    x = signature.inputs[0]
    _, m, n = _sizes(x)
    return _beside(signature, _reflector_scratch(m, n)[0] * x.item_bytes)


def product_of_reflectors(signature: Signature) -> Events:
    """`orgqr`, in place of what it leaves; its factors are copied where they have gaps."""
    x, factors = signature.inputs[:2]
    _, m, n = _sizes(x)
    copy = 0 if contiguous(factors) else factors.nbytes
    return _beside(signature, copy, _product_scratch(m, n) * x.item_bytes)


def inverse(signature: Signature) -> Events:
    """The matrix's factors and pivots (`linalg_inv_ex_out`), and the pivots as they are checked."""
    x = signature.inputs[0]
    batch, n, _ = _sizes(x)
    return _beside(signature, x.nbytes, batch * n * INT, batch * n)


def solve_by_factors(signature: Signature) -> Events:
    """Nothing but the pivots as they are checked, a byte each (`linalg_lu_solve_out`)."""
    return _beside(signature, signature.inputs[1].elements)


def solve(signature: Signature) -> Events:
    """The solution, factors and pivots are all left; one vector is copied (`_linalg_solve_ex_out`)."""
    a, b = signature.inputs[:2]
    batch, n, _ = _sizes(a)
    vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and b.shape == a.shape[:-1])
    return _beside(signature, signature.results[0].nbytes if vector else 0, batch * n)


def solve_cholesky(signature: Signature) -> Events:
    """A copy of the factor (`_cholesky_solve_helper`)."""
    b, factor = signature.inputs[:2]
    t = tile(b)
    return (*_made(signature), *_during(t), *_during(factor.nbytes, tile(factor)))


def solve_triangle(signature: Signature) -> Events:
    """A copy of the triangle where it has gaps (`linalg_solve_triangular_out`)."""
    a = signature.inputs[0]
    return _beside(signature, 0 if in_rows_or_columns(a) else a.nbytes)


def factors(signature: Signature) -> Events:
    """P, L, U beside both in one matrix (`linalg_lu_out`)."""
    x = signature.inputs[0]
    batch, m, n = _sizes(x)
    pivots = batch * min(m, n) * INT
    t = _tile_of(x) if len(x.shape) == 2 else 0
    after = (*_during(_triangle(x)), *_during(*_permutation(x)))
    return (
        *_made(signature),
        x.nbytes,
        pivots,
        batch * INT,
        *_during(t),
        -x.nbytes,
        *after,
        -batch * INT,
        -pivots,
    )


def unpacked(signature: Signature) -> Events:
    """The triangle of a batch of matrices that are not square, then pivots as a permutation (`lu_unpack_out`)."""
    x = signature.inputs[0]
    data, pivots = signature.argument(2, "unpack_data", True), signature.argument(3, "unpack_pivots", True)
    triangle = _during(_triangle(x)) if data else ()
    return (*_made(signature), *triangle, *(_during(*_permutation(x)) if pivots else ()))


def _triangle(x: TensorSpec) -> int:
    """The square part of matrices that are not, copied where they do not lie behind each other."""
    batch, m, n = _sizes(x)
    return batch * min(m, n) ** 2 * x.item_bytes if len(x.shape) > 2 and m != n else 0


def _permutation(x: TensorSpec) -> tuple[int, ...]:
    batch, m, _ = _sizes(x)
    return (m * LONG, batch * m * LONG) if len(x.shape) > 2 else (m * LONG,)


def _tile_of(x: TensorSpec) -> int:
    """The tile of a transposition of as many elements, however they lie."""
    return tile(TensorSpec(shape=x.shape, stride=(x.shape[1], 1), dtype=x.dtype))


def determinant(signature: Signature) -> Events:
    """The exchanges of rows are counted (`lu_det_P`)."""
    x = signature.inputs[0]
    batch, n, _ = _sizes(x)
    codes = batch * INT * (2 if signature.target.startswith("aten._linalg_det.") else 1)
    return _beside(signature, codes, n * INT, batch * n, batch * LONG, batch * n * LONG)


def pseudo_inverse(signature: Signature) -> Events:
    """A singular value decomposition, or that of a symmetric matrix, and the products with it (`linalg_pinv`)."""
    x, (y,) = signature.inputs[0], signature.results
    if not x.elements:
        return _made(signature)
    batch, m, n = _sizes(x)
    k, one = min(m, n), batch * x.item_bytes  # bytes of one number of each matrix
    values = k * one
    if signature.argument(3, "hermitian", False):
        scratch: Events = (batch * INT, _eigh_scratch(x, with_vectors=True), (5 * n + 3) * INT)
        kept: Events = (x.nbytes, values)
        scaled, few = x.nbytes, values + 2 * one
    else:
        scratch = (batch * INT, x.nbytes, tile(x))
        kept = (m * values, n * values, values)
        scaled, few = n * values, one
    after = (values, few, scaled)
    return (
        *kept,
        *_during(*scratch),
        *after,
        y.nbytes,
        *(-n for n in reversed(after)),
        *(-n for n in reversed(kept)),
    )


def exponential(signature: Signature) -> Events:
    """Powers of the matrix and their sums, five of each for the highest polynomial (`compute_T18`)."""
    (y,) = signature.results
    beside = _during(y.nbytes, 5 * y.nbytes, 5 * y.nbytes)
    return (y.nbytes, y.nbytes, *beside, -y.nbytes) if len(y.shape) == 2 else (*beside, *_made(signature))


def distances(signature: Signature) -> Events:
    """Squares and their sums, and both sides with two columns more (`_euclidean_dist`)."""
    a, b = signature.inputs[:2]
    rows, others = (x.nbytes // max(1, x.shape[-1]) for x in (a, b))
    wide, other = a.nbytes + 2 * rows, b.nbytes + 2 * others
    squares = (a.nbytes, rows, -a.nbytes, rows, b.nbytes, others, -b.nbytes, others)
    joined = (a.nbytes, wide, -rows, -rows, -a.nbytes, other, -others, -others)
    return (*squares, *joined, *_made(signature), -other, -wide)


def _of_reals(rule: Rule) -> Rule:
    """No rule says what happens to complex matrices, whose scratch is another."""
    return lambda signature: rule(signature) if all(s.dtype in FLOATS for s in signature.inputs[:1]) else None


# Ops that leave all that they need.
PLAIN: Final = (
    "linalg_cholesky_ex", "cholesky_inverse", "linalg_lu_factor_ex", "triangular_solve",
)  # fmt: skip
_ALL: Final[dict[str, Rule]] = {
    "_linalg_svd": svd,
    "_linalg_eigh": eigh,
    "linalg_eig": eig,
    "linalg_qr": qr,
    "geqrf": reflectors,
    "linalg_householder_product": product_of_reflectors,
    "linalg_inv_ex": inverse,
    "linalg_lu_solve": solve_by_factors,
    "_linalg_solve_ex": solve,
    "cholesky_solve": solve_cholesky,
    "linalg_solve_triangular": solve_triangle,
    "linalg_lu": factors,
    "lu_unpack": unpacked,
    "_linalg_det": determinant,
    "_linalg_slogdet": determinant,
    "linalg_pinv": pseudo_inverse,
    "linalg_matrix_exp": exponential,
    "_euclidean_dist": distances,
    **dict.fromkeys(PLAIN, _made),
}
RULES: Final[dict[str, Rule]] = {name: _of_reals(rule) for name, rule in _ALL.items()}
