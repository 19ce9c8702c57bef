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


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "gt", "ge"])
def test_comparisons_of_two_types(op: str) -> None:
    compare = getattr(aten, op).Tensor
    single, double = tensor((N, N)), tensor((N, N), None, torch.float64)
    short, long = tensor((N, N), None, torch.int32), tensor((N, 1), None, torch.int64)
    # float32 becomes float64, 8192 bytes; the result is 1024 bools.
    assert check(compare, single, double) == (8192, 1024, -8192)
    assert check(compare, short, long) == (8192, 1024, -8192)
    assert check(compare, single, long) == (128, 1024, -128)
    assert check(compare, single, single) == (1024,)
    assert check(compare, single.sum(), single.sum()) == (1,)


def test_arithmetic_in_place_and_of_one_argument() -> None:
    single, long = tensor((N, N)), tensor((N, N), None, torch.int64)
    assert check(aten.add_.Tensor, single, long) == (4096, -4096)
    assert check(aten.add_.Tensor, single, single) == ()
    assert check(aten.sqrt.default, long) == (4096, 4096, -4096)
    assert check(aten.where.self, single > 0, single, tensor((N, N), None, torch.float64)) == (
        8192,
        8192,
        -8192,
    )
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
    check(aten.tril.default, tensor((4, 2, 4, 4), IMAGES[layout]))
    check(aten.nll_loss_forward.default, x, indices, None, 1, -100)
    check(aten.embedding.default, x, indices)
    check(aten.embedding.default, x, torch.zeros(8, 4, dtype=torch.int64).t())


def test_copies_into_rows_from_columns_go_through_a_tile() -> None:
    x, y = torch.rand(60, 70), torch.rand(70, 60)
    rows = {"memory_format": torch.contiguous_format}
    # 4,200 floats through 3,600.
    assert check(aten.clone.default, x.t(), **rows) == (16800, 14400, -14400)
    assert check(aten._to_copy.default, x.t(), **rows) == (16800, 14400, -14400)
    assert check(aten.copy.default, y, x.t()) == (16800, 14400, -14400)
    assert check(aten.copy_.default, y, x.t()) == (14400, -14400)
    assert check(aten.copy_.default, y.t(), x) == ()
    assert check(aten.clone.default, x.t()) == (16800,)
    assert check(aten.clone.default, x[:, :59].t(), **rows) == (14160,)
    assert check(aten.clone.default, x.bfloat16().t(), **rows) == (8400, 7200, -7200)
    assert check(aten._to_copy.default, x.t(), dtype=torch.bfloat16) == (8400,)


def test_indices_of_32_bits_are_converted() -> None:
    x, short = torch.rand(10, 5), torch.zeros(6, 5, dtype=torch.int32)
    source, long = torch.rand(6, 5), short.long()
    # 30 indices of 8 bytes beside 30 floats, and beside 50.
    assert check(aten.gather.default, x, 0, short) == (120, 240, -240)
    assert check(aten.scatter_add.default, x, 0, short, source) == (200, 240, -240)
    assert check(aten.scatter.src, x, 0, short, source) == (200, 240, -240)
    assert check(aten.gather.default, x, 0, long) == (120,)


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
    index = torch.zeros(2, 5, 6, 7, dtype=torch.int64)
    assert check(aten.gather.default, x, 0, index) == (840, 1680, -1680)
    assert check(aten.scatter_add.default, x, 0, index, x) == (1680, 3360, -3360)
    single = torch.rand(20, 20)
    assert check(aten.sub_.Tensor, single.bfloat16(), single) == (1600, 1600, -1600, -1600)


def test_a_sort_keeps_the_indices_of_one_row() -> None:
    assert check(aten.sort.default, torch.rand(3, 100)) == (1200, 2400, 800, -800)
    assert check(aten.sort.default, torch.rand(100, 3), 0) == (1200, 2400, 800, -800)
    assert check(aten.sort.stable, torch.rand(3, 100), stable=True) == (1200, 2400, 800, -800)


@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("kind", ["nearest2d", "bilinear2d", "bicubic2d"])
def test_images_are_enlarged_in_channels_last_if_the_result_is_small(kind: str, channels: int) -> None:
    op = getattr(aten, f"upsample_{kind}").default
    more = () if kind == "nearest2d" else (False,)
    x = torch.rand(2, channels, 8, 8)
    for image in (x, x.to(memory_format=torch.channels_last)):
        check(op, image, [16, 16], *more)
        check(op, image, [64, 80], *more)  # the edges together are longer than 128
    if kind == "nearest2d" and channels == 8:
        # 2 x 8 x 16 x 16 floats, and the same and 2 x 8 x 8 x 8 floats in the other order.
        assert check(op, x, [16, 16]) == (16384, 4096, 16384, -16384, -4096)


def test_what_has_an_image_s_shape_before_it_is_summed_up() -> None:
    x, whole = torch.rand(20, 20), 1600
    assert check(aten.dist.default, x, x) == (whole, 4, -whole)
    assert check(aten.abs.default, torch.rand(20, 20, dtype=torch.complex64)) == (
        whole,
        2 * whole,
        -2 * whole,
    )
    assert check(aten.linalg_vector_norm.default, x, 2, [0], dtype=torch.float64) == (160, 3200, -3200)
    assert check(aten.repeat.default, x, [2, 2])[0] == 4 * whole


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
    # One pixel lies in both orders; the strides say which is meant.
    one = torch.rand(2, 4, 1, 1).as_strided((2, 4, 1, 1), (4, 1, 4, 4) if last else (4, 1, 1, 1))
    check(aten._adaptive_avg_pool2d_backward.default, one, x)
    y, c = tensor((2, 4, 8, 8), IMAGES[image]), torch.rand(4)
    check(aten.native_batch_norm_backward.default, gradient, y, c, c, c, c, c, True, 1e-5, [True, True, True])
