"""Every known model builds without memory, and a user's build function may say things in many ways."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracer.record.step import capture_step, trace_step
from tracer.step.loop import TrainingStep, run_step
from tracer.step.named.models import IMAGE_SIZES, TORCHVISION, TORCHVISION_NAMES, find_model, list_models
from tracer.step.named.vision import classification_loss, import_torchvision
from tracer.step.optimizers import choose_as_on_cuda
from tracer.step.step import BuildStep, load_spec
from traces.devices import device
from traces.errors import CaptureError, EnvironmentProblem, OutOfMemoryProblem, SpecError

NAMES = [m.name for m in list_models()]
# Parameter counts from torchvision's documentation and the publications' checkpoints.
PUBLISHED = {
    "resnet152": 60_192_808,
    "regnet_y_400mf": 4_344_144,
    "vit_b_16": 86_567_656,
    "bert-base": 109_514_298,  # with the masked-LM head, whose decoder is tied to the embedding
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "t5-small": 60_506_624,
    "vit-base": 86_567_656,
}


def fake_step(model: str, **options: Any) -> TrainingStep:
    with FakeTensorMode():
        return load_spec(model, options)()


def one_of_each() -> Iterator[Any]:
    """All names; those of a family that add nothing but a size are slow."""
    families = set()
    for model in list_models():
        family = re.split(r"[\d_]", model.name)[0] if model.family == TORCHVISION else model.family
        again = family in families and model.name not in ("resnet152", "vit_b_16", "bert-base", "gpt2")
        families.add(family)
        yield pytest.param(model.name, marks=pytest.mark.slow) if again else model.name


@pytest.mark.parametrize("name", [*one_of_each()])
def test_every_known_model_builds_on_fake_tensors(name: str) -> None:
    step = fake_step(name, batch_size=2)
    assert step.model.training
    assert step.batch_size == 2
    assert all(isinstance(p, FakeTensor) for p in step.model.parameters())
    assert all(isinstance(t, FakeTensor) for t in step.tensors())
    updated = {id(p) for g in step.optimizer.param_groups for p in g["params"]}  # type: ignore[union-attr]
    assert updated == {id(p) for p in step.model.parameters() if p.requires_grad}
    if name in PUBLISHED:
        assert sum(p.numel() for p in step.model.parameters()) == PUBLISHED[name]


def test_the_list_is_torchvisions_own_list() -> None:
    import_torchvision()
    import torchvision.models

    assert set(torchvision.models.list_models(module=torchvision.models)) == set(TORCHVISION_NAMES)


def test_image_sizes_are_those_of_the_published_weights() -> None:
    import_torchvision()
    from torchvision import models

    for name in TORCHVISION_NAMES:
        crop = next(iter(models.get_model_weights(name))).transforms().crop_size[0]
        # RegNetY-128GF and ViT-H have only weights fine-tuned at a higher resolution than their training's.
        if name not in ("regnet_y_128gf", "vit_h_14"):
            assert IMAGE_SIZES.get(name, 224) == crop, name


def test_auxiliary_classifiers_enter_the_loss_by_their_published_weight() -> None:
    from collections import namedtuple

    outputs = namedtuple("outputs", "logits aux_logits2 aux_logits1")
    labels = torch.tensor([0])
    one = torch.zeros(1, 4)  # cross-entropy: log 4
    total = classification_loss(0.3)(outputs(one, one, one), labels)
    assert total.item() == pytest.approx(1.6 * torch.log(torch.tensor(4.0)).item())
    assert classification_loss(0.3)(outputs(one, None, None), labels).item() == pytest.approx(1.3862944)


def test_options_reach_the_model_and_the_optimizer() -> None:
    step = fake_step("resnet50", optimizer="adamw", image_size=96, batch_size=4)
    assert isinstance(step.optimizer, torch.optim.AdamW)
    assert step.args[0].shape == (4, 3, 96, 96)
    assert fake_step("resnet18", optimizer="none").optimizer is None
    drops = [m.p for m in fake_step("vgg11", dropout=0.2).model.modules() if isinstance(m, nn.Dropout)]
    assert drops == [0.2, 0.2]
    assert fake_step("bert-tiny", dropout=0.0).model.config.hidden_dropout_prob == 0.0
    assert all(p.dtype == torch.bfloat16 for p in fake_step("gpt2-tiny", dtype="bf16").model.parameters())
    assert torch.get_default_dtype() == torch.float32
    widths = {d: fake_step("regnet_x_8gf", dtype=d).model.fc.in_features for d in ("float32", "bfloat16")}
    assert widths == {"float32": 1920, "bfloat16": 1920}


@pytest.mark.parametrize("settings", [{}, {"fused": False}, {"foreach": False}, {"lr": "tensor"}])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "NAdam"])
def test_which_implementation_torch_takes_on_a_gpu(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is told that the parameters are CUDA's, and runs; ours may have chosen for it what it runs then."""
    if kind == "NAdam" and "fused" in settings:
        pytest.skip("it has no fused implementation")
    settings = {k: torch.tensor(0.1) if v == "tensor" else v for k, v in settings.items()}
    module = importlib.import_module(f"torch.optim.{'adam' if kind == 'AdamW' else kind.lower()}")
    monkeypatch.setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    loops = [n for n in vars(module) if n.startswith("_multi_tensor_")]
    foreach: list[bool] = []
    monkeypatch.setattr(module, loops[0], lambda *_, **__: foreach.append(True))
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros(3)
    optimizer = getattr(torch.optim, kind)([p], **settings)
    optimizer.step()
    ours = getattr(torch.optim, kind)([p], **settings)
    choose_as_on_cuda(ours)
    assert bool(ours.param_groups[0]["foreach"]) == bool(foreach)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("resnet151", {}, "did you mean .*resnet152"),
        ("", {}, "unknown"),
        ("resnet18", {"seq_len": 3}, "takes no --seq-len; it takes --batch-size"),
        ("bert-base", {"image_size": 3}, "takes no --image-size"),
        ("bert-base", {"seq_len": 513}, "513 is more than its 512 positions"),
        ("gpt2", {"batch_size": 0}, "at least 1"),
        ("gpt2", {"dropout": 1.0}, "below 1"),
        ("gpt2", {"dropout": "much"}, "--dropout 'much' must be a number"),
        ("gpt2", {"dropout": True}, "--dropout True must be a number"),
        ("gpt2", {"dtype": 32}, "--dtype 32 must be a name"),
        ("gpt2", {"optimizer": ["sgd"]}, "--optimizer .'sgd'. must be a name"),
        (
            "resnet18",
            {"batch_size": 10**18},
            "resnet18 cannot be built with these options: RuntimeError: numel",
        ),
        ("gpt2", {"dtype": "int8"}, "--dtype 'int8' is unknown"),
        ("gpt2", {"optimizer": "lion"}, "'lion' is unknown; known are sgd"),
        ("gpt2", {"attention": "magic"}, "gpt2 cannot be built"),
        ("vit-base", {"image_size": 100}, "multiple of its patches"),
        ("vit_b_16", {"image_size": 100}, "vit_b_16 with --image-size 100"),
        ("maxvit_t", {"image_size": 100}, "maxvit_t with --image-size 100"),
        ("nowhere.py:build", {}, "no such file"),
        ("nowhere.py", {}, "no such file"),
        ("pyproject.toml:build", {}, "unknown"),
    ],
)
def test_mistakes_are_named(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message), FakeTensorMode():
        load_spec(model, options)()


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda1", ""])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(SpecError, match="neither cpu nor cuda"):
        load_spec("resnet18")(device)


def test_one_of_several_gpus_is_the_one_that_is_asked_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory statistics, its name and its clock: torch's functions for them ask the current device.

    Without a number that is the one already, and torch would refuse to be told so.
    """
    chosen: list[int] = []
    made: list[str] = []

    def make(device: str) -> TrainingStep:
        made.append(device)
        raise SpecError("no GPU")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    build = BuildStep(model="m", options={}, seed=0, make=make)
    for place in ("cuda", "cuda:1"):
        with pytest.raises(SpecError, match="no GPU"):
            build(place)
    assert made == ["cuda", "cuda:1"]
    assert chosen == [1]
    with pytest.raises(EnvironmentProblem, match=r"has 2 GPU\(s\)"):
        build("cuda:2")


@pytest.mark.parametrize("model", ["resnet18", "mine"])
def test_memory_that_does_not_suffice_is_an_answer(tmp_path: Path, model: str) -> None:
    if model == "mine":
        (tmp_path / "mine.py").write_text(
            "import torch\ndef build(batch_size): torch.empty(batch_size, 2**33)\n"
        )
        model = f"{tmp_path}/mine.py"
    with pytest.raises(OutOfMemoryProblem, match=r"ran out of memory .*take a smaller batch") as caught:
        load_spec(model, {"batch_size": 10**8})("cpu")
    assert "\n" not in str(caught.value)


PRELUDE = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x, scale=1.0):
        return self.two(self.one(x).relu()) * scale

class WithLoss(Net):
    def forward(self, x, y):
        return {"loss": F.cross_entropy(super().forward(x), y)}

def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)

x, y = torch.randn(5, 4), torch.randint(3, (5,))
"""


def user_step(
    tmp_path: Path, body: str, *, fake: bool = True, function: str = "build", **options: Any
) -> Any:
    file = tmp_path / "mine.py"
    file.write_text(PRELUDE + dedent(body))
    with FakeTensorMode() if fake else contextlib.nullcontext():
        return load_spec(f"{file}:{function}", options)()


RETURNS = {
    "inputs and targets": "m = Net(); return m, (x, y), F.cross_entropy, sgd(m)",
    "loss module": "m = Net(); return m, [x, y], nn.CrossEntropyLoss(), sgd(m)",
    "inputs is a tuple": "m = Net(); return m, ((x, 2.0), y), F.cross_entropy, sgd(m)",
    "inputs is a dict": "m = Net(); return m, ({'x': x, 'scale': 2.0}, y), F.cross_entropy, sgd(m)",
    "last is the targets": "m = Net(); return m, (x, 2.0, y), F.cross_entropy, sgd(m)",
    "mapping with labels": "m = Net(); return m, {'x': x, 'labels': y}, F.cross_entropy, sgd(m)",
    "mapping, two targets": "m = Net(); return m, dict(x=x, a=y, b=y), lambda o, t: F.cross_entropy(o, t['b']), sgd(m)",
    "loss of the output": "m = Net(); return m, (x,), lambda o: F.cross_entropy(o, y.clone()), sgd(m)",
    "tensor": "m = Net(); return m, x, lambda o: o.square().mean(), sgd(m)",
    "loss of one element": "m = Net(); return m, x, lambda o: o.square().mean().reshape(1), sgd(m)",
    "loss inside": "m = WithLoss(); return m, (x, y), None, sgd(m)",
    "three values": "m = WithLoss(); return m, {'x': x, 'y': y}, sgd(m)",
    "dict": "m = WithLoss(); return {'model': m, 'batch': (x, y), 'optimizer': sgd(m)}",
    "optimizer class": "return WithLoss(), (x, y), torch.optim.AdamW",
    "optimizer function": "return WithLoss(), (x, y), None, lambda ps: torch.optim.SGD(ps, lr=0.5)",
    "moved": "m = Net().to('cpu'); return m, (x, y), F.cross_entropy, sgd(m)",
    "converted": "m = Net().to(torch.float64); return m, (x.double(), y), F.cross_entropy, sgd(m)",
    "converted late": "m = Net(); o = sgd(m); m.double(); return m, (x.double(), y), F.cross_entropy, o",
}


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("body", RETURNS.values(), ids=RETURNS.keys())
def test_build_may_return(tmp_path: Path, body: str, fake: bool) -> None:
    source = "def build():\n" + PRELUDE.splitlines()[-1].join(["    ", "\n"]) + f"    {body}\n"
    step = user_step(tmp_path, source, fake=fake)
    assert step.batch_size == 5
    params = {id(p) for p in step.model.parameters()}
    assert {id(p) for g in step.optimizer.param_groups for p in g["params"]} == params
    if fake:
        mode = next(iter(step.model.parameters())).fake_mode
        assert all(isinstance(t, FakeTensor) for t in step.tensors())
    with mode if fake else contextlib.nullcontext():
        loss = step.loss_of(step.model(*step.args, **step.kwargs))
        loss.backward()
        step.optimizer.step()
    assert loss.dim() == 0


def test_what_was_made_at_import_becomes_fake(tmp_path: Path) -> None:
    body = """
    from torch.utils.data import DataLoader, TensorDataset
    m = nn.Sequential(Net(), nn.BatchNorm1d(3))
    o = sgd(m)
    batch = next(iter(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)))
    def build(): return m, batch, F.cross_entropy, o
    """
    step = user_step(tmp_path, body)
    held = (*step.tensors(), *step.model.parameters(), *step.model.buffers())
    assert all(isinstance(t, FakeTensor) for t in held)
    assert {id(p) for p in step.model.parameters()} == {
        id(p) for p in step.optimizer.param_groups[0]["params"]
    }
    captured = capture_step(step)
    assert len(captured.backward) > 5


def test_shared_parameters_stay_shared_through_fake_conversions(tmp_path: Path) -> None:
    body = """
    def build():
        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        m[1].weight = m[0].weight
        m.bfloat16()
        return m, torch.randn(2, 4).bfloat16(), lambda o: o.sum(), sgd(m)
    """
    step = user_step(tmp_path, body)
    assert step.model[1].weight is step.model[0].weight
    assert step.model[0].weight.dtype == torch.bfloat16


LEARNED_LOSS = """
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(7, 3))
    def forward(self, out, target):
        return (out - self.centres[target]).square().mean()
LOSS = Center()
def build():
    m = Net()
    return m, (x, y), LOSS, torch.optim.SGD([*m.parameters(), *LOSS.parameters()])
"""


def test_a_loss_with_parameters_of_its_own_begins_each_step_without_gradients(tmp_path: Path) -> None:
    """As after the ordinary loop's zero_grad(set_to_none=True): otherwise they would add up from step to step, in
    memory that is never given back."""
    step = user_step(tmp_path, LEARNED_LOSS, fake=False)
    assert list(step.loss_parameters) == ["loss.centres"]
    gradients = []
    for _ in range(2):
        run_step(step, step.model, None)
        gradients.append(step.loss_parameters["loss.centres"].grad.clone())
    assert torch.equal(*gradients)


def test_a_loss_s_parameters_are_parameters_of_the_trace(tmp_path: Path) -> None:
    """Made at import, outside the fake mode: 7 * 3 floats."""
    assert all(isinstance(p, FakeTensor) for p in user_step(tmp_path, LEARNED_LOSS).loss_parameters.values())
    sts = trace_step(load_spec(f"{tmp_path}/mine.py"), device("cpu")).trace.storages
    (own,) = [s for s, name in enumerate(sts.name) if name == "loss.centres"]
    assert (sts.category[own], sts.nbytes[own], sts.producer[own]) == ("parameter", 84, -1)
    assert [n for n in sts.name if n == "constant"] == []


def test_build_gets_the_options_that_it_names(tmp_path: Path) -> None:
    body = """
    def build(batch_size=7, *, device="?", seq_len=None):
        assert device == "cpu" and seq_len is None
        m = Net()
        return m, (torch.randn(batch_size, 4), torch.randint(3, (batch_size,))), F.cross_entropy, sgd(m)
    """
    assert user_step(tmp_path, body).batch_size == 7
    assert user_step(tmp_path, body, batch_size=9).args[0].shape == (9, 4)
    with pytest.raises(SpecError, match=r"--image-size was given, but build.. has no parameter 'image_size'"):
        user_step(tmp_path, body, image_size=3)


def test_modules_beside_the_file_are_found_and_the_path_is_left_clean(tmp_path: Path) -> None:
    before = list(sys.path)
    sizes = []
    for size in (2, 3):
        place = tmp_path / str(size)
        place.mkdir()
        (place / "net_beside.py").write_text(
            f"from torch import nn\ndef net(): return nn.Linear({size}, 1)\n"
        )
        body = f"""
        from net_beside import net
        def build():
            m = net()
            return m, torch.randn(5, {size}), lambda o: o.sum(), sgd(m)
        """
        sizes.append(user_step(place, body).model.in_features)
    assert sizes == [2, 3]
    assert sys.path == before


MISTAKES = [
    ("def make(): pass", "no function 'build' in this file; it defines sgd, make"),
    ("build = 3", "is a int, not a function"),
    ("def build(): return 3", "it returned a int; return .model, batch"),
    ("def build(): return Net(), 2", "tuple of 2 values"),
    ("def build(): return {'model': Net()}", "lacks 'batch'"),
    ("def build(): return {'model': Net(), 'batch': x, 'los': None}", "unknown key 'los'"),
    ("def build(): return Net, x, None, None", "the model is a type"),
    ("def build(): return Net(), x, 'mse', None", "the loss is a str"),
    ("def build(): return Net(), x, None, 'adam'", "the optimizer is a str"),
    ("def build(): return Net(), x, None, lambda ps: 3", "function returned a int"),
    (
        "def build(): return Net().requires_grad_(False), x, None, None",
        "no parameter of the model is trainable",
    ),
    ("def build(): return Net(), x, None, sgd(Net())", "4 of the optimizer's parameters are not parameters"),
    ("def build(): return Net(), 'batch', None, None", "the batch is a str"),
    ("def build(): return Net(), (), None, None", "the batch is empty"),
    ("def build(): return Net(), {'q': x}, F.mse_loss, None", "is an argument of Net.forward"),
    ("def build(): return Net(), x, F.mse_loss, None", "only the model's output, no targets"),
    ("def build(q): return 3", "needs a value for q"),
    ("def build(): raise KeyError('oh')", r"mine.py line 21: build.. failed: KeyError: 'oh'"),
    (
        "def build(): raise ValueError('first\\nsecond')",
        r"mine.py line 21: build.. failed: ValueError: first$",
    ),
    ("def build(): exit(3)", r"mine.py line 21: build.. failed: SystemExit: 3"),
    ("build = max", "mine.py:build: Python does not know its parameters"),
    ("import nowhere_at_all", "mine.py line 21: importing the file failed: ModuleNotFoundError"),
    ("def build(:", "mine.py line 21: not valid Python"),
]


@pytest.mark.parametrize(("source", "message"), MISTAKES, ids=[m[1][:30] for m in MISTAKES])
def test_mistakes_of_a_build_function_are_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        user_step(tmp_path, source)


def test_an_error_in_a_directory_of_a_similar_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path begins with that of the user's directory, and is not in it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project_tools").mkdir()
    (tmp_path / "project_tools" / "beside.py").write_text("def fail(): raise KeyError('oh')\n")
    monkeypatch.syspath_prepend(tmp_path / "project_tools")
    with pytest.raises(SpecError, match=r"^mine.py line 22: build\(\) failed: KeyError: 'oh'"):
        user_step(tmp_path / "project", "import beside\ndef build(): beside.fail()")


CALLS = """
calls = []
def build():
    calls.append(type(torch.empty(1)).__name__)
    m = Net()
    {reads}
    m.calls = calls
    return m, x, lambda o: o.square().mean(), torch.optim.SGD(m.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("reads", "kinds"),
    [
        ("assert bool(m.one.weight.abs().sum() > 0)", ["FakeTensor", "Tensor"]),
        ("m.three = nn.LazyLinear(2); m.three(x)", ["FakeTensor", "Tensor"]),
        # The rates of stochastic depth are made so.
        ("assert [v.item() for v in torch.linspace(0, 1, 3)] == [0.0, 0.5, 1.0]", ["FakeTensor", "Tensor"]),
    ],
)
def test_a_function_that_reads_values_is_called_for_real(
    tmp_path: Path, reads: str, kinds: list[str]
) -> None:
    step = user_step(tmp_path, CALLS.format(reads=reads))
    assert step.model.calls == kinds
    parameters = list(step.model.parameters())
    assert all(isinstance(p, FakeTensor) for p in parameters)
    assert isinstance(step.args[0], FakeTensor)
    assert [id(p) for p in step.optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]


def test_an_optimizer_s_function_that_reads_values_is_explained(tmp_path: Path) -> None:
    body = """
    def optimizer(parameters):
        if parameters[0].sum() > 0: pass
    def build():
        return Net(), x, lambda o: o.mean(), optimizer
    """
    with pytest.raises(
        CaptureError, match=r"mine.py line 23: making the optimizer failed: it reads the values"
    ):
        user_step(tmp_path, body)


def test_a_loss_that_is_no_scalar_is_named(tmp_path: Path) -> None:
    for body, message in [
        ("lambda o: o", "shape .5, 3."),
        ("lambda o: 3", "is a int"),
        ("None", "without a loss"),
    ]:
        step = user_step(tmp_path, f"def build(): return Net(), x, {body}, None")
        with pytest.raises(SpecError, match=message), next(iter(step.model.parameters())).fake_mode:
            step.loss_of(step.model(*step.args))


def test_known_models_name_their_family() -> None:
    assert find_model("regnet-x-16gf").name == "regnet_x_16gf"
    assert find_model("RESNET152").family == TORCHVISION
    assert "seq_len" in find_model("llama_1b").takes
    assert len(set(NAMES)) == len(NAMES)


def test_an_edited_file_is_read_again_within_the_same_second(tmp_path: Path) -> None:
    """Two versions of equal length, written right after each other: bytecode of the first would pass for the second."""
    sizes = []
    for size in (5, 7):
        step = user_step(
            tmp_path, f"def build(): return torch.nn.Linear({size}, 1), torch.ones(1, {size}), None, None"
        )
        sizes.append(next(iter(step.model.parameters())).shape[1])
    assert sizes == [5, 7]
