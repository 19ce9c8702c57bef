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
