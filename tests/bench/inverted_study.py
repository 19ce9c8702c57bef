"""The study of Inverted Activations (Novikov and Oseledets, arXiv:2407.15545), beside what competes with it.

python -m tests.bench.inverted_study -o tests/bench/inverted_study.json --report study.html
python -m tests.bench.inverted_study tests/bench/inverted_study.json --report study.html
python -m tests.bench.inverted_study --parts derivative,gradients -o part.json

Five parts, each of which can be asked for alone: the error of the derivative (`derivative`), of the gradient of small
models (`gradients`), what a step needs and takes on an H200 (`memory`, simulated from its trace; nothing ran on a GPU),
what it takes on this CPU (`times`), and a thousand steps of a language model of bytes (`training`). The text is
Python's own reference, which every Python carries (`pydoc_data.topics`).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Final

import click
import torch
from torch import nn
from torch.nn import functional

from executor import apply_plan
from executor.codecs.fewbit import intervals
from executor.codecs.payloads import seed
from executor.inverted.fits import X_MIN
from executor.inverted.formulas import FORWARD, gradient, pack
from simulator.core.formats import FORMATS
from simulator.core.problem import Problem
from simulator.core.rewrites import LEVERS, exactness_of, rewritten_problem
from simulator.core.rewrites.activations import activation_of
from simulator.planners.outcome import percent
from tracer import trace
from tracer.step.loop import TrainingStep
from tracer.step.step import load_spec
from traces.records.plan import Action, Plan, Rewrite, label_actions
from traces.records.trace import Trace

LOSSY: Final = tuple(name for name, rule in FORMATS.items() if not rule.exact)
INPUTS: Final = tuple(name for name in LOSSY if not FORMATS[name].of_activations)  # of any value
STEPS: Final = 1000
SHOWN: Final = ("gelu", "silu")  # on the page's curves, since the paper has constants of them
POINTS: Final = 100  # of a loss curve


@click.command()
@click.argument("given", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path))
@click.option("--report", type=click.Path(path_type=Path))
@click.option("--parts", default="derivative,gradients,memory,times,training", show_default=True)
@click.option("--steps", default=STEPS, show_default=True, help="Of the training.")
def main(given: Path | None, output: Path | None, report: Path | None, parts: str, steps: int) -> None:
    """Work out the study, or take it as it is GIVEN; then write it and its page."""
    study = json.loads(given.read_text()) if given else {}
    if given is None:
        environment: dict[str, Any] = {
            "torch": torch.__version__, "threads": torch.get_num_threads(), "commit": commit(), "seconds": {},
        }  # fmt: skip
        ways: dict[str, Callable[[], Any]] = {
            "derivative": derivative, "gradients": gradients, "memory": memory, "times": times,
            "training": lambda: training(steps),
        }  # fmt: skip
        for part in parts.split(","):
            began = time.process_time()
            click.echo(f"{part} ...", err=True)
            study[part] = rounded(ways[part]())
            environment["seconds"][part] = round(time.process_time() - began)
            click.echo(f"{part}: {environment['seconds'][part]} s of processor time", err=True)
            study["environment"] = environment
            keep(output, study)
    else:
        keep(output, study)
    if report is not None:
        from tests.bench.inverted_study_page import write

        write(report, study)


def commit() -> str:
    """The commit of this checkout, with `-dirty` where files differ; "" outside of one."""
    say = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(say, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def rounded(found: Any) -> Any:
    """With six digits of each number."""
    if isinstance(found, dict):
        return {k: rounded(v) for k, v in found.items()}
    if isinstance(found, list | tuple):
        return [rounded(v) for v in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def keep(output: Path | None, study: Mapping[str, Any]) -> None:
    """Write what is known so far: a part takes many minutes."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(study) + "\n")


# The derivative


def published(y: torch.Tensor, left: torch.Tensor, kind: str) -> torch.Tensor:
    """The derivative from the output by the constants that the paper's code has, of GELU and SiLU."""
    if kind == "gelu":
        depth = 0.16997120747990369
        t, w = torch.clamp((y + depth) / depth, 0, 1), torch.clamp(y + depth, min=0)
        falling = 0.0012176598 - 0.2964121013 * t**0.4423632932 * (1 - t) ** 0.8312705290
        rising = -1.3837179712 + 1.5584201844 * torch.sqrt(w) + 0.0440457480 * w
        return torch.where(left, falling, 1 + rising * torch.exp((-2.1198850898 - w) ** 3 * 0.0321467368))
    w = y + 0.2784645427610738
    falling = -0.5076843705 * torch.sqrt(w) + (0.3574942049 * w + 0.0796313977) * w + 0.2171770076
    rising = -1.3108564021 + 0.8485896470 * torch.sqrt(w) - 0.1629905126 * w
    sigmoid = torch.where(left, falling, 1 + rising * torch.exp((-5.7706133027 - w) ** 3 * 0.0026961640))
    return sigmoid * (1 - y) + y


def exact_slope(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f'(x) by torch's own backward."""
    x = x.detach().requires_grad_()
    (out,) = torch.autograd.grad(FORWARD[kind](x).sum(), x)
    return out


def slopes(x: torch.Tensor, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """f'(x) as each way has it that runs in x's type."""
    yield "torch", exact_slope(x, kind)
    y, left = FORWARD[kind](x), x < X_MIN[kind]
    rows = y.view(8, -1)
    yield "Lowtide", gradient(torch.ones_like(rows), rows, pack(x.view(8, -1), kind), kind).flatten()
    if kind in ("gelu", "silu"):
        yield "the paper's", published(y.float(), left, kind).to(x.dtype)  # as it is compiled
    for bits in (4, 3, 2):
        bounds, points = (x.new_tensor(v) for v in intervals(kind, 1 << bits))
        yield f"few-bit, {bits} bits", exact_slope(points, kind)[torch.bucketize(x, bounds)]


def derivative() -> dict[str, Any]:
    """Errors of f' against float64, of inputs from N(0, 1), and over a grid for the picture."""
    torch.manual_seed(0)
    draws, grid = torch.randn(1 << 20), torch.linspace(-5, 5, 200)
    rows, curves = [], []
    for kind in FORWARD:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = draws.to(dtype)
            true = exact_slope(x.double(), kind)
            for way, found in slopes(x, kind):
                off = found.double() - true
                nan = int(off.isnan().sum())
                rows.append({
                    "activation": kind, "dtype": str(dtype).removeprefix("torch."), "way": way, "nan": nan,
                    "relative": None if nan else float(off.norm() / true.norm()),
                    "largest": None if nan else float(off.abs().max()),
                })  # fmt: skip
        for way, found in slopes(grid, kind):
            off = (found.double() - exact_slope(grid.double(), kind)).abs()
            curves += [
                (kind, way, float(a), float(b)) for a, b in zip(grid, off, strict=True) if kind in SHOWN
            ]
    return {"rows": rows, "curves": curves}


# Gradients of small models, and what the models of the paper's tables need


def bert() -> tuple[Any, ...]:
    """BERT of 4 layers and full width, 2 × 128 tokens."""
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=4, vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return _language(transformers.BertForMaskedLM(config), 2, 128)


def gpt2() -> tuple[Any, ...]:
    """GPT-2 of 4 layers and full width, 2 × 128 tokens; its GELU as torch's own op."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=4, vocab_size=1000, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    return _language(transformers.GPT2LMHeadModel(config), 2, 128)


def llama() -> tuple[Any, ...]:
    """A Llama of 4 layers, 768 and 2,048 wide, 2 × 128 tokens."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=768, intermediate_size=2048, num_attention_heads=12, vocab_size=1000,
        use_cache=False,
    )  # fmt: skip
    return _language(transformers.LlamaForCausalLM(config), 2, 128)


def _language(model: Any, batch: int, length: int) -> tuple[Any, ...]:
    tokens = torch.randint(0, 1000, (batch, length))
    return model, {"input_ids": tokens, "labels": tokens}, None, torch.optim.AdamW(model.parameters())


def bert_base() -> tuple[Any, ...]:
    """What the paper's notebook measures: BERT-base without a head and without dropout, 16 × 512, float32."""
    import transformers

    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertModel(config, add_pooling_layer=False)
    return model, {"input_ids": torch.randint(0, 1000, (16, 512))}, _sum, None


class Frozen(nn.Linear):
    """As 4-bit weights compute: in bfloat16, from and to the type around; nothing is saved for a gradient of theirs."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(torch.bfloat16), self.weight).to(x.dtype)


def mistral() -> tuple[Any, ...]:
    """What the paper's notebook measures: Mistral-7B as prepared for QLoRA, 1 × 4096: weights frozen, gradients of
    activations only, which are float32; of its 32 layers 8, since they are all alike. The notebook runs flash attention
    in float16, and this torch's in float32."""
    import transformers

    config = transformers.MistralConfig(use_cache=False, vocab_size=32000, num_hidden_layers=8)
    model = transformers.MistralForCausalLM(config)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Frozen(child))
    model.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)
    return model, {"input_ids": torch.randint(0, 1000, (1, 4096))}, _sum, None


def _sum(out: Any) -> torch.Tensor:
    total: torch.Tensor = out[0].sum()
    return total


def spec_of(build: Callable[[], Any]) -> str:
    return f"{Path(__file__).resolve()}:{build.__name__}"


def rewrites_of(made: Trace, kind: str) -> tuple[Rewrite, ...]:
    """All that a lever offers."""
    return tuple(LEVERS[kind].offer(Problem(made)))


def plan_by(made: Trace, kind: str) -> Plan:
    rewrites = rewrites_of(made, kind)
    return Plan(meta=made.meta, rewrites=rewrites, exactness=exactness_of(rewrites))


def gradients() -> list[dict[str, Any]]:
    """The relative L2 error of the whole gradient of one step, each lever with all that it can change; under autocast
    against torch under autocast."""
    rows = []
    for build in (bert, gpt2, llama):
        for amp in ("", "bfloat16"):
            options = {"amp": amp} if amp else {}
            made = trace(spec_of(build), target="cpu", profile=False, **options)
            step = load_spec(spec_of(build), options)()
            exact = gradient_of(step, step.model)
            for kind in ("invert", *LOSSY):
                plan = plan_by(made, kind)
                if not plan.rewrites:
                    continue
                seed()
                planned = apply_plan(step.model, plan)
                off = gradient_of(step, planned) - exact
                error = float(off.norm() / exact.norm())
                row = {"model": build.__name__, "autocast": amp, "way": kind, "values": len(plan.rewrites)}
                rows.append({**row, "relative": error})
                click.echo(f"  {rows[-1]}", err=True)
    return rows


def gradient_of(step: TrainingStep, model: nn.Module) -> torch.Tensor:
    step.model.zero_grad()
    with step.autocast.region():
        loss = step.loss_of(model(*step.args, **step.kwargs))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in step.model.parameters() if p.grad is not None]).double()


# Memory and time


def memory() -> list[dict[str, Any]]:
    """Bytes from forward to backward, peak and time of a step on an H200, by its trace: simulated."""
    rows = []
    for build, says in ((bert_base, -23.1), (mistral, -15.7)):
        problem = Problem(trace(spec_of(build), target="h200", profile=False))
        before = problem.saved.timeline

        def row(way: str, step: Problem, actions: tuple[Action, ...] = (), before: Any = before,
                name: str = build.__name__) -> dict[str, Any]:  # fmt: skip
            after = step.replay(actions).timeline
            last = step.trace.meta.forward_ops - 1
            held = after.live_bytes[last] - after.resident_bytes
            return {
                "model": name, "way": way, "held_bytes": held, "peak_bytes": after.peak_allocated_bytes,
                "time_ns": after.step_time_ns, "added_percent": percent(after.step_time_ns - before.step_time_ns,
                                                                        before.step_time_ns),
            }  # fmt: skip

        mine = [row("untouched", problem)]
        rewrites = {kind: tuple(LEVERS[kind].offer(problem)) for kind in ("invert", "int8", "fewbit3")}
        for kind, made in rewrites.items():
            if made:
                mine.append(row(kind, rewritten_problem(problem, made)))
        outputs = _outputs(problem, rewrites["invert"])
        mine.append(row("recompute", problem, outputs))
        for r in mine:
            r["held_percent"] = percent(r["held_bytes"] - mine[0]["held_bytes"], mine[0]["held_bytes"])
        rows += [*mine, {"model": build.__name__, "way": "the paper", "held_percent": says}]
    return rows


def _outputs(problem: Problem, inverted: Sequence[Rewrite]) -> tuple[Action, ...]:
    """What saves as much exactly: each activation is computed again from its input."""
    trace = problem.trace
    pairs = [activation_of(trace, r.storage) for r in inverted]
    outputs = [trace.ops.writes[p[0]][0] for p in pairs if not isinstance(p, str)]
    return tuple(Action(storage=s) for s in outputs if s in problem.candidates)


def times() -> list[dict[str, Any]]:
    """Processor time of a step of the small BERT on this CPU: the least of several, in turns."""
    made = trace(spec_of(bert), target="cpu", profile=False)
    problem = Problem(made)
    inverted = plan_by(made, "invert")
    again = Plan(meta=made.meta, actions=label_actions(made, _outputs(problem, inverted.rewrites)))
    plans = {"untouched": Plan(meta=made.meta), "invert": inverted, "recompute": again}
    plans |= {kind: plan_by(made, kind) for kind in ("int8", "fp8_e4m3", "fewbit3")}
    steps = {}
    for way, plan in plans.items():
        model, batch, _, _ = bert()
        steps[way] = apply_plan(model, plan), batch
    best = dict.fromkeys(plans, float("inf"))
    for _ in range(8):
        for way, (model, batch) in steps.items():
            began = time.process_time()
            model(**batch).loss.backward()
            best[way] = min(best[way], time.process_time() - began)
            model.zero_grad()
    peaks = {
        way: rewritten_problem(problem, plan.rewrites).replay(plan.actions).timeline.peak_allocated_bytes
        for way, plan in plans.items()
    }
    return [{"way": way, "seconds": best[way], "peak_bytes": peaks[way]} for way in plans]


# A thousand steps


@cache
def text() -> torch.Tensor:
    """Python's reference as bytes."""
    from pydoc_data import topics

    return torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8)


def byte_model() -> tuple[Any, ...]:
    """A GPT-2 of bytes: 2 layers, 128 wide, dropout 0.1, batches of 8 × 32."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=128, n_layer=2, n_head=4, activation_function="gelu", use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, {"input_ids": tokens, "labels": tokens}, None, optimizer


class Published(nn.Module):
    """GELU whose backward takes its output and the side, by the paper's constants."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Published.apply(x)
        return y


class _Published(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x)
        ctx.save_for_backward(y, x < X_MIN["gelu"])
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * published(*ctx.saved_tensors, "gelu")


WAYS: Final = (
    *("exact", "invert", "1e-6", "the paper's", "int8", "fp8_e4m3", "int4", "int2"),
    *("fewbit4", "fewbit2", "fewbit3", "fp8_e5m2", "bits"),
)


def training(steps: int) -> dict[str, Any]:
    """Loss curves from one start, on the same batches with the same dropout; `1e-6` begins at weights so far off, which
    shows how far rounding alone leads."""
    made = trace(spec_of(byte_model), target="cpu", profile=False)
    losses = {}
    for way in WAYS:
        losses[way] = train(made, way, steps)
        click.echo(f"  {way}: at last {last(losses[way]):.4f}", err=True)
    return curves(losses)


def curves(losses: dict[str, list[float]]) -> dict[str, Any]:
    """What the losses of the steps by each way come to, beside those of the first."""
    exact = next(iter(losses.values()))
    width = max(1, len(exact) // POINTS)
    runs = {
        way: {
            "equal": mine == exact,
            "last": last(mine),
            "off_percent": 100 * (last(mine) / last(exact) - 1),
            "curve": [round(mean(mine[k : k + width]), 5) for k in range(0, len(mine), width)],
        }
        for way, mine in losses.items()
    }
    return {"steps": len(exact), "per_point": width, "bytes": len(text()), "runs": runs}


def last(losses: Sequence[float]) -> float:
    """The mean of the last tenth."""
    return mean(losses[-max(1, len(losses) // 10) :])


def train(made: Trace, way: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    seed()
    model, _, _, optimizer = byte_model()
    if way == "1e-6":
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=noise))
    if way == "the paper's":
        for block in model.transformer.h:
            block.mlp.act = Published()
    if way in LEVERS:
        model = apply_plan(model, plan_by(made, way))
    draw, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        starts = torch.randint(len(text()) - 32, (8,), generator=draw)
        tokens = torch.stack([text()[s : s + 32] for s in starts]).long()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
