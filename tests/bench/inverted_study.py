"""The study of Inverted Activations (Novikov and Oseledets, arXiv:2407.15545), beside what competes with it.

python -m tests.bench.inverted_study -o traces/gallery/inverted-activations/study.json --report study.html
python -m tests.bench.inverted_study traces/gallery/inverted-activations/study.json --report study.html
python -m tests.bench.inverted_study --parts derivative,gradients -o part.json

Five parts, each of which can be asked for alone: the error of the derivative (`derivative`), of the gradient of small
models (`gradients`), what a step needs and takes on an H200 (`memory`, simulated from its trace; nothing ran on a GPU),
what it takes on this CPU (`times`), and a thousand steps of a language model of bytes (`training`). The text is Python's
own reference, which every Python carries (`pydoc_data.topics`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import torch
from torch import nn
from torch.nn import functional

from executor import apply_plan
from executor.codecs.fewbit import intervals
from executor.codecs.payloads import seed
from executor.inverted.fits import X_MIN, least_output
from executor.inverted.formulas import DIGITS, FORWARD, slope
from executor.training.module import capture_now
from executor.verify import verify
from simulator.core.formats import FORMATS
from simulator.core.problem import Problem
from simulator.core.rewrites import LEVERS, exactness_of, rewritten_problem
from simulator.core.rewrites.pack import ranked
from tracer import trace
from tracer.build.step import load_spec
from traces.records.plan import APPROXIMATE, Plan, Rewrite
from traces.records.trace import Trace

LOSSY: Final = tuple(name for name, rule in FORMATS.items() if not rule.exact)
INPUTS: Final = tuple(name for name in LOSSY if not FORMATS[name].of_activations)  # of any value
STEPS: Final = 1000
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
        ways: dict[str, Callable[[], Any]] = {
            "derivative": derivative, "gradients": gradients, "memory": memory, "times": times,
            "training": lambda: training(steps),
        }  # fmt: skip
        for part in parts.split(","):
            began = time.process_time()
            click.echo(f"{part} ...", err=True)
            study[part] = ways[part]()
            click.echo(f"{part}: {time.process_time() - began:.0f} s of processor time", err=True)
        study["environment"] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(study, indent=1) + "\n")
    if report is not None:
        from tests.bench.inverted_study_page import write

        write(report, study)


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
    yield "Lowtide", slope(y.float(), left, kind, least_output(kind, DIGITS[y.dtype])).to(x.dtype)
    if kind in ("gelu", "silu"):
        yield "the paper's", published(y, left, kind)
    for bits in (4, 3, 2):
        bounds, points = (x.new_tensor(v) for v in intervals(kind, 1 << bits))
        yield f"few-bit, {bits} bits", exact_slope(points, kind)[torch.bucketize(x, bounds)]


def derivative() -> dict[str, Any]:
    """Errors of f' against float64, of inputs from N(0, 1), and over a grid for the picture."""
    torch.manual_seed(0)
    draws, grid = torch.randn(1 << 20), torch.linspace(-5, 5, 201)
    rows, curves = [], []
    for kind in FORWARD:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = draws.to(dtype)
            true = exact_slope(x.double(), kind)
            for way, found in slopes(x, kind):
                off = found.double() - true
                rows.append({
                    "activation": kind, "dtype": str(dtype).removeprefix("torch."), "way": way,
                    "relative": float(off.norm() / true.norm()), "largest": float(off.abs().max()),
                    "nan": int(off.isnan().sum()),
                })  # fmt: skip
        for way, found in slopes(grid, kind):
            off = (found.double() - exact_slope(grid.double(), kind)).abs()
            curves += [(kind, way, float(a), float(b)) for a, b in zip(grid, off, strict=True)]
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
    activations only, which are float32. The notebook runs flash attention in float16, and this torch's in float32."""
    import transformers

    config = transformers.MistralConfig(use_cache=False, vocab_size=32000)
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
    """The relative L2 error of the whole gradient of one step, each lever with all that it can change."""
    rows = []
    for build in (bert, gpt2, llama):
        for amp in ("", "bfloat16"):
            spec = load_spec(spec_of(build), {"amp": amp} if amp else {})
            made = trace(spec_of(build), target="cpu", profile=False, **({"amp": amp} if amp else {}))
            for kind in ("invert", *LOSSY):
                seed()
                plan = plan_by(made, kind)
                if plan.rewrites:
                    error = verify(spec, replace(plan, exactness=APPROXIMATE), steps=1).gradient_error
                    rows.append({
                        "model": build.__name__, "autocast": amp, "way": kind, "values": len(plan.rewrites),
                        "relative": error,
                    })  # fmt: skip
                    click.echo(f"  {rows[-1]}", err=True)
    return rows
