"""The CPU's rules on tensors that lie otherwise than kernels take them, against what torch's profiler sees."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.torch.cpu_calls import peak, told_and_found  # noqa: E402

aten = torch.ops.aten
N = 32
MATRICES = {
    "rows": (N, 1), "columns": (1, N), "one number": (0, 0), "one row": (0, 1), "one column": (1, 0),
    "part": (2 * N, 1), "every second": (2 * N, 2),
}  # fmt: skip
IMAGES = {"rows": (256, 64, 8, 1), "channels last": (256, 1, 32, 4), "one number": (0, 0, 0, 0)}


def tensor(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype: Any = torch.float32) -> Any:
    if stride is None:
        return torch.ones(shape, dtype=dtype)
    items = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.rand(items).to(dtype).as_strided(shape, stride)


def check(op: Any, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """The rule's events, whose peak must be the measured one."""
    told, found = told_and_found(op, *args, **kwargs)
    assert peak(told) == peak(found), (told, found)
    return told


@pytest.mark.parametrize("layout", MATRICES)
def test_matrix_products(layout: str) -> None:
    odd, plain = tensor((N, N), MATRICES[layout]), tensor((N, N))
    copied = layout in ("one number", "one row", "one column", "every second")
    for a, b in ((odd, plain), (plain, odd)):
        # The product is 32 x 32 floats: 4096 bytes, and so is a copied factor.
        assert check(aten.mm.default, a, b) == ((4096, 4096, -4096) if copied else (4096,))
        check(aten.addmm.default, tensor((N,)), a, b)
    check(aten.mm.default, odd, odd.t())
    batch = tensor((3, N, N), (4 * N * N, *MATRICES[layout]))
    check(aten.bmm.default, batch, tensor((3, N, N)))
    check(aten.bmm.default, batch, batch)
    few = tensor((3, 4, 4), (64, *MATRICES[layout]))  # 4 * 4 * 4 multiplications
    assert check(aten.bmm.default, few, few) == (3 * 64,)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_sums_of_other_types(dtype: Any) -> None:
    x = tensor((N, N), None, dtype)
    wide = dtype in (torch.int64, torch.float32)
    # 1024 elements become int64: 8192 bytes.
    assert check(aten.sum.dim_IntList, x, [0])[1:] == (() if wide else (8192, -8192))
    check(aten.sum.default, x)
    check(aten.sum.default, x, dtype=torch.float64)


def test_arithmetic_in_place_and_of_one_argument() -> None:
    single, long = tensor((N, N)), tensor((N, N), None, torch.int64)
    assert check(aten.add_.Tensor, single, long) == (4096, -4096)
    assert check(aten.add_.Tensor, single, single) == ()
    assert check(aten.sqrt.default, long) == (4096, 4096, -4096)
    assert check(aten.where.self, single > 0, single, single) == (4096,)


@pytest.mark.parametrize("layout", ["rows", "one number"])
def test_arguments_that_must_be_contiguous(layout: str) -> None:
    x = tensor((N, N), MATRICES[layout])
    indices = torch.zeros(N, dtype=torch.int64)
    copy = () if layout == "rows" else (4096, -4096)
    # 100 x 32 floats are 12,800 bytes.
    assert check(aten.embedding_dense_backward.default, x, indices, 100, -1, False) == (12800, *copy)
    assert check(aten.tril.default, x) == (4096,)
    assert check(aten.tril.default, tensor((2, N, N), (N * N, 1, N))) == (8192,)
    check(aten.nll_loss_forward.default, x, indices, None, 1, -100)
    check(aten.embedding.default, x, indices)
    check(aten.embedding.default, x, torch.zeros(8, 4, dtype=torch.int64).t())


def test_halves_are_summed_up_in_float32_where_they_do_not_lie_side_by_side() -> None:
    x = torch.rand(4, 5, 6, 7).bfloat16()
    # 840 numbers and 5 sums, 4 bytes each.
    assert check(aten.sum.dim_IntList, x, [0, 2, 3]) == (10, 20, 3360, -3360, -20)
    assert check(aten.sum.dim_IntList, x, [2, 3]) == (40,)
    assert check(aten.sum.dim_IntList, x[:, :1].contiguous(), [0, 2, 3]) == (2,)
    assert check(aten.sum.dim_IntList, x[:, :1], [0, 2, 3]) == (2, 4, 672, -672, -4)
    last = x.to(memory_format=torch.channels_last)
    assert check(aten.sum.dim_IntList, last, [0, 2, 3]) == (10,)
    turned = torch.rand(6, 7, 5).bfloat16().permute(2, 0, 1)
    assert check(aten.sum.dim_IntList, turned, [0, 1]) == (14, 28, 840, -840, -28)
    single = torch.rand(20, 20)
    assert check(aten.sub_.Tensor, single.bfloat16(), single) == (1600, 1600, -1600, -1600)


# A single thread enlarges larger images of three channels bilinearly in channels last, too.
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("kind", ["nearest2d", "bilinear2d"])
def test_images_are_enlarged_in_channels_last_if_the_result_is_small(kind: str, channels: int) -> None:
    op = getattr(aten, f"upsample_{kind}").default
    more = () if kind == "nearest2d" else (False,)
    x = torch.rand(2, channels, 8, 8)
    for image in (x, x.to(memory_format=torch.channels_last)):
        check(op, image, [16, 16], *more)
        # The edges together are longer than 128: sources and weights of their places are left out.
        told, found = told_and_found(op, image, [64, 80], *more)
        assert abs(peak(told) - peak(found)) <= (64 + 80) * 2 * 12
    if kind == "nearest2d" and channels == 8:
        # 2 x 8 x 16 x 16 floats, and the same and 2 x 8 x 8 x 8 floats in the other order.
        assert check(op, x, [16, 16]) == (16384, 4096, 16384, -16384, -4096)


def test_a_norm_in_another_type() -> None:
    assert check(aten.linalg_vector_norm.default, torch.rand(20, 20), 2, [0], dtype=torch.float64) == (
        160, 3200, -3200,
    )  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("gradient", ["heads outside", "rows outside", "one number"])
def test_attention_takes_a_gradient_with_rows_outside(gradient: str) -> None:
    def halves(rows_outside: bool) -> Any:
        return torch.rand(2, 48, 4, 16).transpose(1, 2) if rows_outside else torch.rand(2, 4, 48, 16)

    number = torch.ones(()).expand(2, 4, 48, 16)
    dy = number if gradient == "one number" else halves(gradient == "rows outside")
    for q in (halves(True), halves(False)):
        y, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = check(backward, dy, q, q, q, y, sums, 0.0, False)
        assert found.count(dy.numel() * 4) == (3 if gradient == "rows outside" else 4)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_rolls(dims: int) -> None:
    check(aten.roll.default, tensor((4, 4, 4, 4)), [1] * dims, list(range(dims)))


@pytest.mark.parametrize("layout", IMAGES)
@pytest.mark.parametrize("image", ["rows", "channels last"])
def test_backward_of_pooling_and_batch_norm(layout: str, image: str) -> None:
    gradient = tensor((2, 4, 8, 8), IMAGES[layout])
    last = image == "channels last"
    x = torch.rand(2, 4, 16, 16).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    check(aten._adaptive_avg_pool2d_backward.default, gradient, x)
    square = [2, 2]
    check(aten.avg_pool2d_backward.default, gradient, x, square, square, [0, 0], False, True, None)
    _, indices = aten.max_pool2d_with_indices.default(x, square, square)
    check(
        aten.max_pool2d_with_indices_backward.default,
        gradient,
        x,
        square,
        square,
        [0, 0],
        [1, 1],
        False,
        indices,
    )
    if not last:
        check(aten._adaptive_avg_pool2d_backward.default, torch.rand(2, 4, 1, 1), x)
    y, c = tensor((2, 4, 8, 8), IMAGES[image]), torch.rand(4)
    check(aten.native_batch_norm_backward.default, gradient, y, c, c, c, c, c, True, 1e-5, [True, True, True])
