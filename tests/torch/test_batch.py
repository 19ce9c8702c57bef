"""What a batch gives to the model and what to the loss, and what is said where it fits neither."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tracer.step.batch import split_batch, to_device
from traces.errors import SpecError

A, B, T = torch.zeros(1), torch.zeros(2), torch.zeros(3)
Pair = namedtuple("Pair", "a b")


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Two(nn.Module):
    def forward(self, a: Any, b: Any) -> Any:
        return a + b


class Several(nn.Module):
    def forward(self, *x: Any) -> Any:
        return x


def loss(output: Any, target: Any) -> Any:
    return output


def test_a_tuple_of_inputs_goes_one_by_one_or_whole_as_forward_can_take_it() -> None:
    assert split_batch(Two(), ((A, B), T), loss).args == (A, B)
    assert split_batch(Several(), ([A, B], T), loss).args == (A, B)
    assert split_batch(One(), ((A, B), T), loss).args == ((A, B),)
    assert split_batch(One(), (Pair(A, B), T), loss).args == (Pair(A, B),)
    assert split_batch(One(), (A, B), None).args == ((A, B),)
    assert split_batch(Two(), (A, B), None).args == (A, B)


def test_of_a_loss_without_targets_forward_gets_all_that_it_cannot_do_without() -> None:
    def alone(output: Any) -> Any:
        return output

    assert split_batch(Two(), (A, B), alone).args == (A, B)
    assert split_batch(One(), (A, T), alone).args == (A,)
    assert split_batch(Two(), ((A, B), T), alone).args == (A, B)


class Optional(nn.Module):
    def forward(self, x: Any, h: Any = None) -> Any:
        return x


def test_what_forward_may_do_without_is_not_ignored_without_a_word() -> None:
    def alone(output: Any) -> Any:
        return output

    for model in (Optional(), Several()):
        with pytest.raises(SpecError, match=f"may be for {type(model).__name__}.forward or for nobody"):
            split_batch(model, (A, T), alone)
        assert split_batch(model, ((A, B), None), alone).args == (A, B)
        assert split_batch(model, (A,), alone).args == (A,)
        assert split_batch(model, (A, T), loss).args == (A,)
    assert split_batch(Optional(), {"x": A, "h": B}, alone).kwargs == {"x": A, "h": B}


@pytest.mark.parametrize(
    ("model", "batch"), [(One, (A, B, T)), (Two, (A, T)), (Two, {"a": A, "c": T}), (One, ({"y": A}, T))]
)
def test_what_forward_cannot_take_is_said_before_anything_runs(model: type[nn.Module], batch: Any) -> None:
    with pytest.raises(
        SpecError, match=f"{model.__name__}.forward cannot be called with what the batch holds"
    ):
        split_batch(model(), batch, loss)


@dataclass
class Data:
    a: torch.Tensor


def test_an_object_that_hides_its_tensors_is_refused_and_a_nested_mapping_is_a_dict() -> None:
    with pytest.raises(SpecError, match=r"the batch holds a Data.*register_dataclass\(Data\)"):
        split_batch(One(), (Data(A), T), loss)
    moved = to_device((UserDict({"x": A}), T), "cpu", None)
    assert type(moved[0]) is dict
    assert split_batch(One(), moved, loss).kwargs == {"x": A}
