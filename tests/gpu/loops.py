"""Training loops as people write them, for one GPU: python tests/gpu/loops.py NAME.

Each trains for a few steps in its own way; what it takes is measured on a GPU and rehearsed without one.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

STEPS = 4


def gpt2(layers: int = 6) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers)).cuda()


def tokens(batch: int = 8, length: int = 512, vocabulary: int = 50_000) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), device="cuda")


def language(model: nn.Module, amp: Any = None, clip: bool = False, **how: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    for _ in range(STEPS):
        x = tokens()
        with torch.autocast("cuda", amp, enabled=amp is not None):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def plain() -> None:
    language(gpt2(), clip=True)


def fused() -> None:
    language(gpt2().bfloat16(), fused=True)


def checkpointed() -> None:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    language(model, torch.bfloat16)


def compiled() -> None:
    language(torch.compile(gpt2()), torch.bfloat16)


def graphs() -> None:
    model = torch.compile(
        nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8))).cuda(),
        mode="reduce-overhead",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS + 3):
        model(torch.randn(4096, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled() -> None:
    """A convnet in float16 with a gradient scaler, channels last, validation after each step."""
    from torchvision.models import resnet50

    model = resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler()
    for _ in range(STEPS):
        x = torch.randn(32, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(1000, (32,), device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.eval()
        with torch.no_grad():
            model(x).argmax(1)
        model.train()


def recurrent() -> None:
    embed, lstm, head = (
        nn.Embedding(10_000, 512),
        nn.LSTM(512, 1024, 2, dropout=0.2, batch_first=True),
        nn.Linear(1024, 10_000),
    )
    model = nn.ModuleList([embed, lstm, head]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x = tokens(64, 128, 10_000)
        out = head(lstm(embed(x))[0])
        functional.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated() -> None:
    """Lengths differ from batch to batch, four of which make a step."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        for part in range(4):
            x = tokens(4, 128 + 96 * ((step + part) % 4))
            (model(input_ids=x, labels=x).loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def trainer(**settings: Any) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": x, "labels": x} for x in tokens(64, 256).cpu()]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=STEPS, bf16=True, report_to=[], save_strategy="no",
            disable_tqdm=True, **settings,
        )  # fmt: skip
        Trainer(gpt2().cpu(), args, train_dataset=data).train()


def trainer_checkpointed() -> None:
    trainer(gradient_checkpointing=True, gradient_accumulation_steps=2)


def lightning() -> None:
    import pytorch_lightning as pl
    from torchvision.models import resnet18

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet18()

        def training_step(self, batch: Any, _: int) -> Any:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = [(torch.randn(3, 224, 224), k % 10) for k in range(64)]
    pl.Trainer(
        max_steps=STEPS,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Net(), torch.utils.data.DataLoader(data, batch_size=16))


def adapters() -> None:
    """Low-rank adapters of PEFT: most weights are frozen."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        gpt2(), LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )
    language(model, torch.bfloat16)


def gan() -> None:
    """Two models and two optimizers take turns."""
    make = [nn.Linear(128, 4096), nn.ReLU(), nn.Linear(4096, 3 * 64 * 64), nn.Tanh()]
    judge = [nn.Linear(3 * 64 * 64, 4096), nn.LeakyReLU(0.2), nn.Linear(4096, 1)]
    maker, judged = nn.Sequential(*make).cuda(), nn.Sequential(*judge).cuda()
    first, second = (torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in (judged, maker))
    for _ in range(STEPS):
        real, noise = torch.randn(256, 3 * 64 * 64, device="cuda"), torch.randn(256, 128, device="cuda")
        fake = maker(noise)
        first.zero_grad()
        (
            functional.softplus(-judged(real)).mean() + functional.softplus(judged(fake.detach())).mean()
        ).backward()
        first.step()
        second.zero_grad()
        functional.softplus(-judged(fake)).mean().backward()
        second.step()


def sharded() -> None:
    """FSDP2 on one rank, with NCCL."""
    group()
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = gpt2()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    language(model, clip=True)


def replicated() -> None:
    """DistributedDataParallel on one rank, with NCCL."""
    group()
    language(nn.parallel.DistributedDataParallel(gpt2()))


def group() -> None:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))


def resident() -> None:
    """An average of weights on the GPU, and a learning rate on it."""
    model = gpt2()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-4, device="cuda"), foreach=True, capturable=True
    )
    for _ in range(STEPS):
        x = tokens()
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


def planned() -> None:
    """Within a budget, by Lowtide."""
    from executor import fit

    model, x = gpt2(), tokens()
    batch = {"input_ids": x, "labels": x}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model = fit(model, batch, optimizer=optimizer, budget="70%")
    for _ in range(STEPS):
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stderr.write(f"{model.receipt()}\n")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
