"""The segments of checkpoint_sequential, against torch's own function."""

from __future__ import annotations

import pytest
import torch

from simulator.planners.segments import OUTSIDE, torch_segment


def test_segments_agree_with_torchs_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.checkpoint as source

    seen: list[object] = []
    monkeypatch.setattr(source, "checkpoint", lambda run, x, **more: (seen.append("segment"), run(x))[1])

    class Note(torch.nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: object) -> object:
            seen.append(self.k)
            return x

    for blocks in range(1, 9):
        for segments in range(1, blocks + 1):
            seen.clear()
            source.checkpoint_sequential(
                [Note(k) for k in range(blocks)], segments, torch.zeros(1), use_reentrant=False
            )
            inside: list[int] = []
            number = OUTSIDE
            theirs = {}
            for word in seen:
                if word == "segment":
                    number += 1
                    inside.append(number)
                else:
                    theirs[word] = number
            ours = [torch_segment(b, blocks, segments) for b in range(blocks)]
            checkpointed = segments - 1
            # blocks after the last checkpointed segment run plainly, which torch does not mark
            assert len(inside) == checkpointed
            assert all(o in (theirs[b], OUTSIDE) for b, o in enumerate(ours))
            assert [b for b, o in enumerate(ours) if o != OUTSIDE] == list(
                range(blocks // segments * checkpointed)
            )
