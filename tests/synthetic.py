"""Build training steps of the size and shape of real networks without tracing one, for timing and for low budgets."""

from __future__ import annotations

import random

from tests.tiny import Op, bwd, fwd, trace
from traces.records.trace import ACTIVATION, BACKWARD, EAGER, FORWARD, GRADIENT, OPTIMIZER, PARAMETER, Trace

FLOPS_PER_NS = 40_000  # 40 TFLOP/s
BYTES_PER_NS = 3_500  # 3.5 TB/s
LAUNCH_NS = 5_000


def _time(flops: int, moved: int) -> int:
    return LAUNCH_NS + max(flops // FLOPS_PER_NS, moved // BYTES_PER_NS)


def resnet(blocks: tuple[int, ...] = (3, 8, 36, 3), batch: int = 32, side: int = 224) -> Trace:
    """A bottleneck ResNet in float32 with SGD: conv, batch norm (three outputs), relu, residual adds, a linear head."""
    ops: list[Op] = []
    resident: dict[str, int] = {"images": batch * 3 * side * side * 4}
    categories: dict[str, str] = {}
    backward: list[Op] = []  # in forward order; reversed in the end

    def emit(op: Op) -> None:
        ops.append(op)

    def conv(
        x: str, name: str, c_in: int, c_out: int, out_side: int, k: int, x_bytes: int, module: str
    ) -> str:
        weight = f"{name}.w"
        resident[weight] = c_in * c_out * k * k * 4
        size = batch * c_out * out_side * out_side * 4
        flops = 2 * batch * out_side * out_side * c_in * c_out * k * k
        emit(Op(FORWARD, {name: size}, (x, weight), _time(flops, size + x_bytes), module=module, name=name))
        backward.append(
            Op(
                BACKWARD,
                {f"d{x}@{name}": x_bytes, f"d{weight}": resident[weight]},
                (f"d{name}", x, weight),
                _time(2 * flops, 2 * (size + x_bytes)),
                module=module,
            )
        )
        return name

    def norm(x: str, size: int, channels: int, module: str) -> str:
        y = f"{x}.bn"
        resident[f"{y}.w"] = channels * 4
        emit(
            Op(
                FORWARD,
                {y: size, f"{y}.mean": channels * 4, f"{y}.rstd": channels * 4},
                (x, f"{y}.w"),
                _time(0, 3 * size),
                module=module,
                name=y,
            )
        )
        backward.append(
            Op(
                BACKWARD,
                {f"d{x}": size, f"d{y}.w": channels * 4},
                (f"d{y}", x, f"{y}.w", f"{y}.mean", f"{y}.rstd"),
                _time(0, 5 * size),
                module=module,
            )
        )
        return y

    def relu(x: str, size: int, module: str) -> str:
        y = f"{x}.relu"
        emit(Op(FORWARD, {y: size}, (x,), _time(0, 2 * size), module=module, name=y))
        emit(Op(FORWARD, {}, (y,), 0, view=f"{y}.detach", module=module))
        backward.append(
            Op(BACKWARD, {f"d{x}": size}, (f"d{y}", f"{y}.detach"), _time(0, 3 * size), module=module)
        )
        return y

    side //= 4
    stem_side = side * 2
    stem = batch * 64 * stem_side * stem_side * 4
    x = conv("images", "conv1", 3, 64, stem_side, 7, resident["images"], "conv1")
    x = relu(norm(x, stem, 64, "bn1"), stem, "relu")
    size = batch * 64 * side * side * 4
    emit(Op(FORWARD, {"pool": size, "pool.idx": size * 2}, (x,), _time(0, stem + size), module="maxpool"))
    backward.append(
        Op(BACKWARD, {f"d{x}": stem}, ("dpool", x, "pool.idx"), _time(0, 2 * stem), module="maxpool")
    )
    x, c_in = "pool", 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for b in range(count):
            module = f"layer{stage + 1}.{b}"
            in_side = side
            if b == 0 and stage > 0:
                side //= 2
            x_bytes = batch * c_in * in_side * in_side * 4
            inner_in = batch * width * in_side * in_side * 4
            inner, outer = batch * width * side * side * 4, batch * width * 4 * side * side * 4
            h = conv(x, f"{module}.conv1", c_in, width, in_side, 1, x_bytes, module)
            h = relu(norm(h, inner_in, width, module), inner_in, module)
            h = conv(h, f"{module}.conv2", width, width, side, 3, inner_in, module)
            h = relu(norm(h, inner, width, module), inner, module)
            h = conv(h, f"{module}.conv3", width, width * 4, side, 1, inner, module)
            h = norm(h, outer, width * 4, module)
            shortcut = x
            if b == 0:
                shortcut = conv(x, f"{module}.down", c_in, width * 4, side, 1, x_bytes, module)
                shortcut = norm(shortcut, outer, width * 4, module)
            y = f"{module}.add"
            emit(Op(FORWARD, {y: outer}, (h, shortcut), _time(0, 3 * outer), module=module, name=y))
            backward.append(Op(BACKWARD, {}, (f"d{y}",), 0, view=f"alias:{h}:{shortcut}", module=module))
            x, c_in = relu(y, outer, module), width * 4
    resident["fc.w"] = c_in * 1000 * 4
    emit(
        Op(
            FORWARD,
            {"flat": batch * c_in * 4},
            (x,),
            _time(0, batch * c_in * side * side * 4),
            module="avgpool",
        )
    )
    emit(Op(FORWARD, {"logits": batch * 4000}, ("flat", "fc.w"), LAUNCH_NS, module="fc"))
    emit(Op(FORWARD, {"loss": 4}, ("logits",), LAUNCH_NS, flags=EAGER))
    emit(Op(BACKWARD, {"dlogits": batch * 4000}, ("logits", "loss"), LAUNCH_NS, flags=EAGER))
    emit(
        Op(
            BACKWARD,
            {"dflat": batch * c_in * 4, "dfc.w": resident["fc.w"]},
            ("dlogits", "flat", "fc.w"),
            LAUNCH_NS,
        )
    )
    last_bytes = batch * c_in * side * side * 4
    emit(Op(BACKWARD, {f"d{x}": last_bytes}, ("dflat",), _time(0, last_bytes), module="avgpool"))
    known: dict[str, list[str]] = {f"d{x}": [f"d{x}"]}  # gradient name -> partial gradients, summed at need
    sizes: dict[str, int] = {f"d{x}": last_bytes}
    gradients = ["dfc.w"]
    for op in reversed(backward):
        wanted = op.reads[0]
        parts = known[wanted]
        grad = parts[0]
        for n, part in enumerate(parts[1:]):
            total = f"{wanted}+{n}"
            emit(
                Op(
                    BACKWARD,
                    {total: sizes[wanted]},
                    (grad, part),
                    _time(0, 3 * sizes[wanted]),
                    overwrites=grad,
                )
            )
            grad = total
        if op.view:  # the residual add: its gradient goes to both branches
            for target in op.view.split(":")[1:]:
                known.setdefault(f"d{target}", []).append(grad)
                sizes[f"d{target}"] = sizes[wanted]
            continue
        makes = dict(op.makes)
        if op.reads[1:2] == ("images",):
            makes.pop("dimages@conv1")
        emit(Op(BACKWARD, makes, (grad, *op.reads[1:]), op.time_ns, module=op.module))
        for made in makes:
            if made.endswith(".w"):
                gradients.append(made)
            else:
                target = made.split("@")[0]
                known.setdefault(target, []).append(made)
                sizes[target] = makes[made]
    for g in gradients:
        emit(Op(OPTIMIZER, {}, (g, g[1:]), LAUNCH_NS, flags=EAGER))
    end = len(ops) - 1
    for op in ops:
        for made in op.makes:
            categories[made] = GRADIENT if op.phase == BACKWARD else ACTIVATION
    categories.update(dict.fromkeys(resident, PARAMETER))
    return trace(ops, resident, dict.fromkeys(gradients, end), categories)


def ladder(n: int, *, seed: int) -> Trace:
    """A chain in which every value also reads an earlier one, of uneven sizes and times."""
    draw = random.Random(seed)
    ops = [fwd({"x0": 100}, "w", time_ns=7)]
    for k in range(1, n):
        far = f"x{max(0, k - 2 - draw.randrange(3))}"
        size = draw.choice([50, 100, 200])
        ops.append(fwd({f"x{k}": size}, *dict.fromkeys((f"x{k - 1}", far)), time_ns=draw.randrange(1, 20)))
    ops.append(bwd({f"g{n}": 4}, f"x{n - 1}"))
    ops += [
        bwd({f"g{k}": 4}, f"g{k + 1}", *dict.fromkeys((f"x{k}", f"x{max(0, k - 3)}")))
        for k in range(n - 1, -1, -1)
    ]
    return trace(ops, {"w": 4})


def decoder(layers: int, *, batch: int = 4, length: int = 1024, width: int = 1024) -> Trace:
    """A decoder in float32 without an optimizer: per layer two norms, fused attention, an MLP of four times the width.

    About 40 ops a layer, views included.
    """
    ops: list[Op] = []
    resident = {"tokens": batch * length * 8}
    one = batch * length * width * 4  # a value of the residual stream
    weights: list[str] = []

    def weight(name: str, size: int) -> str:
        resident[name] = size
        weights.append(name)
        return name

    def matmul(name: str, x: str, n_in: int, n_out: int, module: str) -> str:
        flops, size = 2 * batch * length * n_in * n_out * width**2, one * n_out
        w = weight(f"{name}.w", n_in * n_out * width**2 * 4)
        ops.append(fwd({}, w, view=f"{w}.t", module=module))
        ops.append(fwd({name: size}, x, f"{w}.t", time_ns=_time(flops, size + one * n_in), module=module))
        return name

    def norm(name: str, x: str, module: str) -> str:
        w = weight(f"{name}.w", width * 8)
        makes = {name: one, f"{name}.mean": batch * length * 4, f"{name}.rstd": batch * length * 4}
        ops.append(fwd(makes, x, w, time_ns=_time(0, 3 * one), module=module))
        return name

    def pointwise(name: str, size: int, module: str, *reads: str) -> str:
        time_ns = _time(0, size * (1 + len(reads)))
        ops.append(fwd({name: size}, *reads, time_ns=time_ns, module=module))
        return name

    ops.append(fwd({"h0": one}, "tokens", weight("wte", 32 * width * 1024), time_ns=_time(0, 2 * one)))
    x = "h0"
    blocks: list[tuple[str, str, str]] = []
    for k in range(layers):
        m = f"h.{k}"
        n1 = norm(f"{m}.ln1", x, f"{m}.ln1")
        qkv = matmul(f"{m}.qkv", n1, 1, 3, f"{m}.attn")
        ops.extend(fwd({}, qkv, view=f"{m}.{part}", module=f"{m}.attn") for part in "qkv")
        makes = {f"{m}.att": one, f"{m}.lse": batch * length * 16 * 4}
        flops = 4 * batch * length * length * width
        parts = (f"{m}.q", f"{m}.k", f"{m}.v")
        ops.append(fwd(makes, *parts, time_ns=_time(flops, 4 * one), module=f"{m}.attn"))
        proj = matmul(f"{m}.proj", f"{m}.att", 1, 1, f"{m}.attn")
        mid = pointwise(f"{m}.mid", one, m, x, proj)
        n2 = norm(f"{m}.ln2", mid, f"{m}.ln2")
        up = matmul(f"{m}.up", n2, 1, 4, f"{m}.mlp")
        act = pointwise(f"{m}.gelu", 4 * one, f"{m}.mlp", up)
        down = matmul(f"{m}.down", act, 4, 1, f"{m}.mlp")
        out = pointwise(f"{m}.out", one, m, mid, down)
        blocks.append((x, m, out))
        x = out
    ops.append(fwd({"loss": 4}, x, time_ns=_time(0, one), flags=EAGER))
    ops.append(bwd({f"d{x}": one}, "loss", x, time_ns=_time(0, 2 * one), flags=EAGER))

    def back(makes: dict[str, int], flops: int, *reads: str) -> None:
        moved = sum(makes.values()) + one * len(reads)
        ops.append(bwd(makes, *reads, time_ns=_time(flops, moved)))

    def back_matmul(name: str, x: str, n_in: int, n_out: int) -> None:
        flops = 2 * batch * length * n_in * n_out * width**2
        ops.append(bwd({}, f"{name}.w", view=f"{name}.w.tt"))
        back({f"d{x}@": one * n_in}, flops, f"d{name}", f"{name}.w.tt")
        ops.append(bwd({}, f"d{name}", view=f"d{name}.t"))
        back({f"d{name}.w": n_in * n_out * width**2 * 4}, flops, f"d{name}.t", x)

    for x, m, out in reversed(blocks):
        ops.append(bwd({}, f"d{out}", view=f"d{m}.down"))
        back_matmul(f"{m}.down", f"{m}.gelu", 4, 1)
        back({f"d{m}.up": 4 * one}, 0, f"d{m}.gelu@", f"{m}.up")
        back_matmul(f"{m}.up", f"{m}.ln2", 1, 4)
        back(
            {f"d{m}.mid0": one, f"d{m}.ln2.w": width * 8}, 0,
            f"d{m}.ln2@", f"{m}.mid", f"{m}.ln2.mean", f"{m}.ln2.rstd", f"{m}.ln2.w",
        )  # fmt: skip
        back({f"d{m}.proj": one}, 0, f"d{out}", f"d{m}.mid0")
        back_matmul(f"{m}.proj", f"{m}.att", 1, 1)
        flops = 10 * batch * length * length * width
        parts = (f"{m}.q", f"{m}.k", f"{m}.v")
        back({f"d{m}.qkv": 3 * one}, flops, f"d{m}.att@", *parts, f"{m}.att", f"{m}.lse")
        back_matmul(f"{m}.qkv", f"{m}.ln1", 1, 3)
        back(
            {f"d{m}.in": one, f"d{m}.ln1.w": width * 8}, 0,
            f"d{m}.ln1@", x, f"{m}.ln1.mean", f"{m}.ln1.rstd", f"{m}.ln1.w",
        )  # fmt: skip
        back({f"d{x}": one}, 0, f"d{m}.proj", f"d{m}.in")
    last = len(ops) - 1
    gradients = [f"d{w}" for w in weights if w != "wte"]
    categories = {made: GRADIENT if op.phase == BACKWARD else ACTIVATION for op in ops for made in op.makes}
    return trace(ops, resident, dict.fromkeys(gradients, last), categories)
