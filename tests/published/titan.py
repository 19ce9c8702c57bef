"""torchtitan's own trainer, as it was at commits that others measured, on tokens that are made up.

TITAN=FOLDER torchrun tests/published/titan.py ARGUMENT ...: FOLDER is a checkout of torchtitan at commit 9dec370
(December 2024), whose train.py runs unchanged (in float8 with torchao 0.8); if TITAN25 comes first among the
arguments, the folder that it names is one at e7c0cae (June 2025, torchao 0.13). Attention is FlashAttention's.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

TOKENIZER = SimpleNamespace(n_words=128_256, eos_id=0)


def batches(batch: int, length: int, named: bool = False) -> Iterator[tuple[Any, torch.Tensor]]:
    """Without end: data and its tokenizer are not in reach, and no figure depends on them."""
    while True:
        tokens = torch.zeros(batch, length + 1, dtype=torch.long)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        yield {"input": x} if named else x, y


def main(*arguments: str) -> None:
    """Run the trainer with these arguments."""
    later = arguments[0] == "TITAN25"
    folder = os.environ["TITAN25" if later else "TITAN"]
    config = f"{folder}/{'torchtitan/models/llama3/' * later}train_configs/llama3_8b.toml"
    sys.argv = [f"{folder}/train.py", "--job.config_file", config, *arguments[later:]]
    sys.path.insert(0, folder)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if later:
        import_module("torchtitan.models")
        known = import_module("torchtitan.protocols.train_spec")._train_specs

        def loader(*_: Any, job_config: Any, **__: Any) -> Any:
            return batches(job_config.training.local_batch_size, job_config.training.seq_len, named=True)

        made: Any = {"build_tokenizer_fn": lambda _: TOKENIZER, "build_dataloader_fn": loader}
        known["llama3"] = replace(known["llama3"], **made)
        runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
    else:
        from torchtitan import datasets

        datasets.build_tokenizer = lambda *_: TOKENIZER
        datasets.build_hf_data_loader = lambda _data, _path, _tokenizer, *sizes: batches(*sizes[:2])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
