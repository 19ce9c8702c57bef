"""torchtitan's own trainer, as it was at the commit that others measured, on tokens that are made up.

TITAN=FOLDER torchrun tests/published/titan.py --job.config_file ...: FOLDER is a checkout of torchtitan at commit
9dec370 (December 2024), whose train.py runs unchanged (in float8 with torchao 0.8). Attention is FlashAttention's.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import torch

VOCABULARY = 128_256


class Tokenizer:
    n_words = VOCABULARY


class Loader:
    """Batches without end: data and its tokenizer are not in reach, and no figure depends on them."""

    def __init__(self, _dataset: str, _path: str, _tokenizer: Any, batch: int, length: int, *_: Any) -> None:
        self._shape = (batch, length + 1)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            tokens = torch.zeros(self._shape, dtype=torch.long)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main(folder: str) -> None:
    """Run train.py with the arguments of this process."""
    sys.path.insert(0, folder)
    torch.backends.cuda.enable_cudnn_sdp(False)
    from torchtitan import datasets

    datasets.build_tokenizer = lambda *_: Tokenizer()
    datasets.build_hf_data_loader = Loader
    config = os.path.join(folder, "train_configs", "llama3_8b.toml")
    sys.argv = [os.path.join(folder, "train.py"), "--job.config_file", config, *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(os.environ["TITAN"])
