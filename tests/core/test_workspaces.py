"""What the rules say an op allocates inside itself on a GPU, against bytes worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tracer.costs.rules_cuda.cub import radix_sort, scan, unique_by_key
from tracer.costs.rules_cuda.reductions import partial_results
from tracer.costs.rules_cuda.workspaces import TABLE, flash_splits, half_depthwise, rule_events
from tracer.costs.signature import Signature, TensorSpec
from tracer.costs.table import copied
from traces.devices import device

A100, H200, T4 = device("a100-40"), device("h200"), device("t4")


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] = ()) -> TensorSpec:
    if not stride:
        steps = [1]
        for n in reversed(shape[1:]):
            steps.append(steps[-1] * n)
        stride = tuple(reversed(steps)) if shape else ()
    return TensorSpec(shape=shape, stride=stride, dtype=dtype)


def events(target: str, args: tuple[Any, ...], outputs: tuple[Any, ...], on: Any = A100) -> Any:
    """What is allocated and freed; which of equally large blocks goes is told by `named`."""
    found = named(target, args, outputs, on)
    return found and tuple(e for e in found if e)


def named(target: str, args: tuple[Any, ...], outputs: tuple[Any, ...], on: Any = A100) -> Any:
    return rule_events(Signature(target=target, args=args, outputs=outputs), on, (2, 13))


MADE = {"out", *(f"o{k}" for k in range(9))}


def test_every_row_says_where_it_comes_from() -> None:
    names = [rule.name for rule in TABLE.rules]
    assert len(names) == len(set(names)) >= 20
    for rule in TABLE.rules:
        assert len(rule.source) > 20
        known = {name for name, _ in rule.let}
        for event in rule.events:
            given = event.lstrip("-=")
            assert event in MADE or given in {*known, "cublas", "cublaslt"}, (rule.name, event)
        assert not known & {
            *TABLE.functions,
            "sm",
            "sms",
            "deterministic",
            "arg",
            "release",
            "cublas",
            "cublaslt",
        }, rule.name


def test_flash_backward() -> None:
    # B 2, H 4, S 100, D 80, bfloat16: S is rounded to 128, D to 96.
    q = spec(2, 4, 100, 80, dtype="bfloat16")
    inner = spec(2, 4, 100, 80, dtype="bfloat16", stride=(32000, 80, 320, 1))  # contiguous as [B, S, H, D]
    args = (inner, q, q, q, inner, spec(2, 4, 100), None, None, 100, 100, 0.0, False)
    n = 2 * 4 * 100 * 80 * 2
    d, dq = 4 * 2 * 4 * 128, 4 * 2 * 128 * 4 * 96
    target = "aten._scaled_dot_product_flash_attention_backward.default"
    assert events(target, args, (q, q, q)) == (n, n, n, d, dq, -dq, -d)
    # A gradient and an output in another layout are copied first.
    found = events(target, (q, q, q, q, q, *args[5:]), (q, q, q))
    assert found == (n, n, n, n, n, d, dq, -dq, -d, -n, -n)
    # The copies are the first two of five; the gradients stay.
    blocks = named(target, (q, q, q, q, q, *args[5:]), (q, q, q))
    assert blocks[-8:] == (0, 0, 0, -n, 0, 0, 0, -n)
    # Grouped queries: gradients of keys and values for all heads, [2, 100, 4, 80] each.
    kv = spec(2, 2, 100, 80, dtype="bfloat16")
    half = n // 2
    found = events(target, (inner, q, kv, kv, *args[4:]), (q, kv, kv))
    assert found == (n, half, half, d, dq, n, n, -n, -n, -dq, -d)


def test_flash_forward_splits_only_what_leaves_the_gpu_idle() -> None:
    target = "aten._scaled_dot_product_flash_attention.default"
    # 16 * 12 * ceil(512 / 64) = 1536 blocks fill 2 * 108 slots by far: one part.
    q, lse = spec(16, 12, 512, 64, dtype="bfloat16"), spec(16, 12, 512)
    assert events(target, (q, q, q, 0.0, True), (q, lse)) == (q.nbytes, lse.nbytes)
    # 1 * 2 * ceil(128 / 64) = 4 blocks for 216 slots, keys of 4096 in 16 blocks of 256: 16 parts of 4 = 64 slots.
    q, k, lse = spec(1, 2, 128, 64, dtype="bfloat16"), spec(1, 2, 4096, 64, dtype="bfloat16"), spec(1, 2, 128)
    assert flash_splits(4, 216, 16) == 16
    lses, outs = 4 * 16 * 2 * 128, 4 * 16 * 2 * 128 * 64
    assert events(target, (q, k, k), (q, lse)) == (q.nbytes, lse.nbytes, lses, outs, -outs, -lses)
    # With dropout the kernel does not split, and its random state is copied.
    assert events(target, (q, k, k, 0.1), (q, lse)) == (q.nbytes, lse.nbytes, 16, -16)
    assert events(target, (spec(1, 2, 1, 64), k, k), (q, lse)) is None  # one query: another path


@pytest.mark.parametrize(
    ("blocks", "slots", "keys", "parts"),
    [
        (200, 216, 16, 1),  # 200 >= 0.8 * 216
        (48, 108, 64, 2),  # the example in flash_api.cpp: 2 parts fill 0.89, 3 only 0.67
        (1, 216, 1, 1),
    ],
)
def test_the_number_of_parts(blocks: int, slots: int, keys: int, parts: int) -> None:
    assert flash_splits(blocks, slots, keys) == parts


def test_efficient_backward() -> None:
    target = "aten._scaled_dot_product_efficient_attention_backward.default"

    def found(dtype: str, head: int, on: Any = A100) -> Any:
        q = spec(2, 4, 100, head, dtype=dtype)
        args = (q, q, q, q, None, q, spec(2, 4, 128), None, None, 0.0, (True, True, True, False), False)
        inner = spec(2, 4, 100, head, dtype=dtype, stride=(400 * head, head, 4 * head, 1))
        return q.nbytes, events(target, (inner, *args[1:]), (q, q, q, None), on)

    rows = 4 * 2 * 4 * 100  # a float32 for each row
    # float32, head 64: gradient times output as float32, its row sums, their copy; then 2 * 4 buffers of
    # ceil(100 / 64) * ceil(64 / 64) tiles of 64 * 64 numbers and 16 bytes of locks.
    n, out = found("float32", 64)
    tiles = 2 * 4 * 2 * (16 + 4 * 64 * 64)
    assert out == (n, n, n, n, rows, rows, -rows, -n, tiles, -rows, -tiles)
    # Half precision computes the row sums in the kernel.
    n, out = found("float16", 64)
    assert out == (n, n, n, rows, tiles, -rows, -tiles)
    # Heads of 128: one tile of 128 * 128 where the shared memory is large ...
    n, out = found("float16", 128)
    large = 2 * 4 * (16 + 4 * 128 * 128)
    assert out == (n, n, n, rows, large, -rows, -large)
    # ... on T4 2 of 128 * 64, and on L4 2 * 2 of 64 * 64 if there is dropout, with keys and values of 2 splits of
    # 64 * 128 beside them; here there is none.
    n, out = found("float16", 128, T4)
    small = 2 * 4 * 2 * (16 + 4 * 128 * 64)
    assert out == (n, n, n, rows, small, -rows, -small)
    n, out = found("float16", 128, device("l4"))
    spilled = 2 * 4 * (4 * (16 + 4 * 64 * 64) + 2 * 4 * 2 * 64 * 128)
    assert out == (n, n, n, rows, spilled, -rows, -spilled)


def test_embedding_backward_sorts_above_3072_indices() -> None:
    target = "aten.embedding_dense_backward.default"
    small, weight = spec(2, 1024, 8), spec(100, 8)
    index = spec(2, 1024, dtype="int64")
    assert events(target, (small, index, 100, -1, False), (weight,)) == (3200,)
    # 4096 indices, 100 rows of 8: sorted, original and range of 32 KiB each; scratch of 8 passes of 256 bins of 8
    # bytes, 2 tiles of 3840 with 256 counters of 4 bytes, and 64 KiB; 100 segments, 409 + 100 partial sums, which are
    # added up where they belong, since 100 blocks leave 108 multiprocessors idle.
    grad, index = spec(4, 1024, 8), spec(4, 1024, dtype="int64")
    n, scratch = 8 * 4096, 8 * 2048 + 2 * 1024 + 2 * 8 * 4096 + 256 + 255
    assert events(target, (grad, index, 100, -1, False), (weight,)) == (
        n, n, n, scratch, -scratch, -n, 3200, n, 8, n, 1279, -1279, -n, 800, 800, 1279, -1279, 8, 8 * 509, 8 * 509,
        -8 * 509, -8 * 509, -8, -800, -800, -8, -n, -n, -n,
    )  # fmt: skip


def test_an_embedding_copies_indices_that_are_not_contiguous() -> None:
    # Token types are one row of zeros that is expanded: 4 * 64 indices of 8 bytes.
    index = spec(4, 64, dtype="int64", stride=(0, 1))
    table, out = spec(2, 8), spec(4, 64, 8)
    assert events("aten.embedding.default", (table, index), (out,)) == (2048, 8192, -2048)
    assert events("aten.embedding.default", (table, spec(4, 64, dtype="int64")), (out,)) == (8192,)
    backward = (out, index, 2, -1, False)
    assert events("aten.embedding_dense_backward.default", backward, (table,)) == (2048, 64, -2048)


def test_layer_norm_backward_has_partial_sums_for_many_short_rows_only() -> None:
    target = "aten.native_layer_norm_backward.default"

    def found(rows: int, width: int) -> Any:
        x, w, s = spec(rows, width), spec(width), spec(rows, 1)
        return x.nbytes, events(target, (x, x, (width,), s, s, w, w, (True, True, True)), (x, w, w))

    n, out = found(65536, 64)
    assert out == (n, 256, 256)
    # 65600 rows of 64: 2 columns of blocks, min(16384, 2050) rows of them, 64 float32 each, twice.
    n, out = found(65600, 64)
    part = 2050 * 64 * 4
    # The parts are added up by an ordinary sum, which has partial results of its own.
    staged = partial_results(spec(2050, 64), (0,), (8, 0), 108, 4)
    assert len(staged) == 2
    total = (256, *staged, *(-b for b in reversed(staged)), -256)
    assert out == (n, 256, 256, part, part, *total, *total, -part, -part)
    n, out = found(65600, 2048)  # 64 columns are more than half of 108 multiprocessors
    assert out == (n, 8192, 8192)


# What torch's wheels for CUDA 13.0 asked their allocator for when told of 132 multiprocessors of capability 9.0.
ASKED = [
    (spec(8192, 128), (0,), (8_388_608, 4)),
    (spec(8192, 512), (0,), (33_554_432, 16)),
    (spec(16384, 768), (0,), (100_663_296, 24)),
    (spec(256, 30522), (0,), ()),  # many results: a block each
    (spec(8192, 50257), (0,), ()),
]


@pytest.mark.parametrize(("x", "dims", "asked"), ASKED)
def test_sums_that_several_blocks_share(x: TensorSpec, dims: tuple[int, ...], asked: tuple[int, ...]) -> None:
    out = spec(x.shape[1])
    found = events("aten.sum.dim_IntList", (x, dims, False), (out,), H200)
    assert found == (out.nbytes, *asked, *(-b for b in reversed(asked)))


def test_the_buffer_of_a_sum_by_hand() -> None:
    """8192 rows of 128 float32: 128 / 4 = 32 columns of threads, 128 // 32 = 4 rows of them, 2048 values each; 132 * 16
    slots for 1 block, 2048 / 16 = 128 blocks of 16 values a thread: 128 results * 128 blocks * 32 * 4 * 4 bytes."""
    assert partial_results(spec(8192, 128), (0,), (9, 0), 132, 4) == (128 * 128 * 32 * 4 * 4, 4)
    # Fewer threads fit a multiprocessor of 8.6, but 2048 / 16 blocks are fewer still.
    assert partial_results(spec(8192, 128), (0,), (8, 6), 82, 4) == (128 * 128 * 32 * 4 * 4, 4)
    # Along the rows nothing is multiplied: 1 result, 512 threads, 2**20 / 512 = 2048 values each, 128 blocks.
    assert partial_results(spec(2**20), (), (9, 0), 132, 4) == (128 * 4, 4)
    assert partial_results(spec(4, 100), (1,), (9, 0), 132, 4) == ()
    assert partial_results(spec(0, 100), (0,), (9, 0), 132, 4) == ()


def test_a_sum_of_another_type_than_its_input_reads_a_converted_copy() -> None:
    """A mask of 6 bools becomes 6 int64; a slice of 2 x 3 bools (strides 4, 1) a dense copy of 6; float16 stays."""
    total = TensorSpec(shape=(), stride=(), dtype="int64")
    mask = TensorSpec(shape=(2, 3), stride=(3, 1), dtype="bool")
    assert events("aten.sum.default", (mask,), (total,), H200) == (8, 48, -48)
    cut = TensorSpec(shape=(2, 3), stride=(4, 1), dtype="bool")
    assert events("aten.sum.default", (cut,), (total,), H200) == (8, 48, -48)
    half = TensorSpec(shape=(2, 3), stride=(3, 1), dtype="float16")
    single = TensorSpec(shape=(), stride=(), dtype="float32")
    assert events("aten.sum.default", (half,), (single,), H200) == (4,)
    # 2**20 bools are 2**20 int64, whose partial sums are as wide: 128 blocks, as in the test by hand above.
    many = TensorSpec(shape=(2**20,), stride=(1,), dtype="bool")
    assert events("aten.sum.default", (many,), (total,), H200) == (
        8,
        2**23,
        128 * 8,
        4,
        -4,
        -128 * 8,
        -(2**23),
    )


def test_a_scalar_may_be_summed_over_its_one_dimension() -> None:
    scalar = TensorSpec(shape=(), stride=(), dtype="float32")
    for dims in ((0,), (-1,), ()):
        assert events("aten.sum.dim_IntList", (scalar, dims, False), (scalar,), H200) == (4,)


def test_a_sum_of_more_than_two_gib_is_unknown() -> None:
    x = spec(2**20, 1024)
    assert events("aten.sum.dim_IntList", (x, (0,), False), (spec(1024),), H200) is None
    with pytest.raises(LookupError, match="2 GiB"):
        partial_results(x, (0,), (9, 0), 132, 4)


def test_a_maximum_with_its_place_is_staged_in_pairs() -> None:
    """A GPU recording of a 2.7B model's loss (H100, torch 2.6) has this request in torch.max(logits, -1, keepdim=True):
    2,048 rows of 10,000 logits that lie column by column."""
    logits = spec(4, 512, 10_000, stride=(512, 1, 2_048))
    best, place = spec(4, 512, 1), spec(4, 512, 1, dtype="int64")
    staged = 553_648_128
    found = events("aten.max.dim", (logits, -1, True), (best, place), device("h100"))
    assert found == (8_192, 16_384, staged, 64, -64, -staged)
    # Row by row a block of threads makes each result by itself.
    rows = spec(4, 512, 10_000)
    assert events("aten.max.dim", (rows, -1, True), (best, place), device("h100")) == (8_192, 16_384)


# target, input, arguments behind it, outputs, what else torch 2.11 asks for on a driver that does nothing
APART = spec(64, 33, 4, 128, stride=(1, 32768, 64, 256))
REDUCED: Any = [
    ("aten.argmin.default", APART, (), (spec(dtype="int64"),), (4325376, 2112, 4)),
    ("aten.amin.default", APART, (), (spec(),), (528, 4)),
    ("aten.max.default", APART, (), (spec(),), (4325376, 528, 4)),
    ("aten.std.correction", APART, (), (spec(),), (2112, 4)),
    ("aten.linalg_vector_norm.default", spec(1_000_000), (), (spec(),), (492, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("target", "x", "rest", "outputs", "asked"), REDUCED)
def test_what_other_reductions_stage(target: str, x: Any, rest: Any, outputs: Any, asked: Any) -> None:
    found = events(target, (x, *rest), outputs, device("h100"))
    assert found == (outputs[0].nbytes, *asked, *(-n for n in reversed(asked)))


def test_softmax() -> None:
    x = spec(2, 8, 8, dtype="float16")
    assert events("aten._softmax_backward_data.default", (x, x, -1, "torch.float16"), (x,)) == (
        256,
        256,
        -256,
    )
    # softmax 256, mask of 128 bools, 16 rows, the zero that is filled in.
    assert events("aten._safe_softmax.default", (x, -1), (x,)) == (256, 128, 16, 2, -2, -16, -128)
    turned = spec(2, 8, 8, dtype="float16", stride=(64, 1, 8))
    assert events("aten._log_softmax.default", (turned, -1, False), (x,)) == (256, 256, -256)


def test_the_mask_of_a_dropout_is_drawn_with_an_output_that_is_dropped() -> None:
    x, mask = spec(4, 8), spec(4, 8, dtype="bool")
    assert events("lowtide.dropout_mask.default", (x, 0.1), (mask,)) == (32, 128, -128)


def test_adding_up_by_indices_sorts_them() -> None:
    x, index, values = spec(10, 4), spec(6, dtype="int64"), spec(6, 4)
    target = "aten.index_put.default"
    assert events(target, (x, (index,), values), (x,)) == (160,)
    assert events(target, (x, (index,), values, True), (x,)) == (
        160, 8, 8, 1, -1, 1, -1, -8, -8, 48, 48, -48, 48, 48, 48, 1, -1, -48, -48, -48, -48
    )  # fmt: skip


def test_what_a_contiguous_copy_takes() -> None:
    x = spec(2, 3, 4)
    assert copied(x) == 0
    assert copied(x, 0, 2, 1) == 96
    assert copied(spec(2, 3, 4, stride=(12, 1, 3))) == 96
    assert copied(spec(2, 3, 4, stride=(12, 1, 3)), 0, 2, 1) == 0
    assert copied(spec(2, 1, 4, stride=(4, 99, 1))) == 0  # the stride of one element does not matter
    assert copied(spec(3, 4, stride=(0, 1))) == 48


def test_a_more_capable_gpu_splits_by_its_multiprocessors() -> None:
    assert (H200.multiprocessors, A100.multiprocessors, T4.multiprocessors) == (132, 108, 40)


def test_the_scratch_of_sorts_and_scans() -> None:
    """What torch 2.15 asks for on the null driver."""
    n = 2**22
    assert [radix_sort(n, 8, 8, sm) for sm in (75, 80, 90)] == [1_528_319, 1_121_791, 935_423]
    assert [radix_sort(n, 4, 8, sm) for sm in (75, 80, 90)] == [368_127, 660_991, 660_991]
    assert radix_sort(4096, 8, 16, 90) == 71_167  # two passes: keys and values a second time
    assert radix_sort(2304, 8, 64, 90) == 1
    assert [scan(n, size) for size in (2, 4, 8)] == [9_727, 18_431, 76_031]
    assert [unique_by_key(n, 8, sm) for sm in (75, 80, 90)] == [210_943, 51_199, 14_847]
    assert unique_by_key(17_408, 8, 89) == 2_047


def test_a_convolution_copies_what_lies_otherwise_than_cudnn_takes_it() -> None:
    # Images of 4 channels seen from memory in channels last: the weights are copied into that, 8 * 4 * 9 * 4 bytes.
    last = spec(2, 4, 16, 16, stride=(1024, 1, 64, 4))
    weight, out = spec(8, 4, 3, 3), spec(2, 8, 14, 14)
    rest = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    target = "aten.convolution.default"
    assert events(target, (last, weight, *rest), (out,)) == (out.nbytes, 1152, -1152)
    # A slice of wider ones is copied, too, and first.
    slice_ = spec(2, 4, 16, 16, stride=(2048, 1, 128, 8))
    assert events(target, (slice_, weight, *rest), (out,)) == (8192, out.nbytes, 1152, -1152, -8192)
    # Expanded ones are not in channels last.
    wide = spec(2, 4, 16, 16, stride=(0, 256, 16, 1))
    assert events(target, (wide, weight, *rest), (out,)) == (8192, out.nbytes, -8192)
    # Doubles are never taken in channels last; T4 has no convolutions of bfloat16.
    double = [spec(*x.shape, dtype="float64", stride=x.stride) for x in (last, weight, out)]
    assert events(target, (*double[:2], *rest), (double[2],)) == (16384, double[2].nbytes, -16384)
    half = [spec(*x.shape, dtype="bfloat16", stride=x.stride) for x in (last, weight, out)]
    assert events(target, (*half[:2], *rest), (half[2],), T4) is None
    assert events(target, (spec(2, 4, 9, 9, 9), spec(8, 4, 3, 3, 3), *rest), (spec(2, 8, 7, 7, 7),)) is None


def test_a_convolution_backward_copies_the_gradient_for_each_of_its_two() -> None:
    x, weight, gradient = spec(2, 4, 16, 16), spec(8, 4, 3, 3), spec(2, 8, 14, 14, stride=(0, 0, 0, 0))
    rest = ((8,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, True))
    target = "aten.convolution_backward.default"
    outputs = (x, weight, spec(8))
    whole = gradient.nbytes
    assert events(target, (gradient, x, weight, *rest), outputs) == (
        x.nbytes, whole, -whole, whole, weight.nbytes, -whole, 32,
    )  # fmt: skip
    # A kernel of torch's own for one filter a channel: the gradient once, and that of the weights first.
    weight, rest = spec(4, 1, 3, 3), (*rest[:-2], 4, (True, True, False))
    turned, gradient = spec(2, 4, 16, 16, stride=(1024, 256, 1, 16)), spec(2, 4, 14, 14, stride=(0, 0, 0, 0))
    whole = gradient.nbytes
    assert events(target, (gradient, turned, weight, *rest), (x, weight, None)) == (
        whole, x.nbytes, weight.nbytes, -x.nbytes, x.nbytes, -whole,
    )  # fmt: skip


def test_cudnn_takes_some_depthwise_convolutions_of_halves() -> None:
    """And gives the gradient of the input first."""
    rest = ((0,), (1, 1), (1, 1), (1, 1), False, (0, 0), 32, (True, True, False))
    for dtype, first in (("float16", 0), ("bfloat16", 1), ("float32", 1)):
        x, weight = spec(2, 32, 14, 14, dtype=dtype), spec(32, 1, 3, 3, dtype=dtype)
        made = (x.nbytes, weight.nbytes)
        found = events("aten.convolution_backward.default", (x, x, weight, *rest), (x, weight, None))
        assert found == (made[first], made[not first])


@pytest.mark.parametrize(
    ("shape", "side", "step", "apart", "wanted"),
    [
        ((8, 31, 14, 14), (3, 3), 1, 1, False),
        ((8, 32, 14, 14), (3, 3), 1, 1, True),
        ((8, 32, 14, 14), (3, 3), 1, 2, False),
        ((8, 32, 14, 14), (3, 5), 1, 1, False),
        ((8, 32, 14, 14), (7, 7), 1, 1, False),
        ((8, 32, 14, 6), (3, 3), 1, 1, False),
        ((8, 512, 14, 14), (3, 3), 3, 1, False),
        ((8, 511, 14, 14), (3, 3), 2, 1, False),
        ((8, 512, 14, 14), (3, 3), 2, 1, True),
        ((8, 256, 28, 28), (5, 5), 2, 1, True),
        ((1, 32, 14, 14), (3, 3), 2, 1, True),
        ((1, 32, 28, 28), (1, 1), 2, 1, True),
        ((1, 32, 29, 29), (1, 1), 2, 1, False),
        ((16, 128, 7, 7), (1, 1), 2, 1, True),
        ((17, 128, 7, 7), (1, 1), 2, 1, False),
        ((8, 32, 5), (9,), 1, 1, True),
        ((8, 512, 64), (3,), 2, 1, False),
    ],
)
def test_which_depthwise_convolutions_of_halves_are_cudnn_s(
    shape: tuple[int, ...], side: tuple[int, ...], step: int, apart: int, wanted: bool
) -> None:
    x, weight = spec(*shape, dtype="float16"), spec(shape[1], 1, *side, dtype="float16")
    assert half_depthwise(x, weight, (step,) * len(side), (apart,) * len(side)) is wanted
