"""Captures without descriptions of trees and without code: the same trees, the same graph."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.functional_tensor import dispatch_functionalize  # noqa: E402
from torch.fx import traceback as fx_traceback  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from tracer.capture.torch_fixes.quick_graphs import quick_graphs  # noqa: E402
from tracer.torch_api import (  # noqa: E402
    FunctionalTensor,
    FunctionalTensorMode,
    aot_autograd,
    functorch_config,
    pytree,
    release,
)

Pair = namedtuple("Pair", "a b")


def test_trees_are_mapped_as_torch_maps_them():
    nested = (1, [2, None, ()], Pair(3, {"x": 4}))
    tree: Any = {"b": nested, "a": OrderedDict(z=5, y=[6]), "s": torch.Size([7, 8]), "i": slice(9, None)}
    seen: list[Any] = []
    right = pytree.tree_map(lambda x: ("was", x), tree)
    order = pytree.tree_leaves(tree)
    only = pytree.tree_map_only(int, lambda x: x + 1, tree)
    pairs = pytree.tree_map(lambda x, y: (x, y), (1, [2]), (3, [4]))
    stopped = pytree.tree_map(str, (1, [2]), is_leaf=lambda x: isinstance(x, list))
    own = pytree.tree_map
    with quick_graphs(), quick_graphs():
        assert own is not pytree.tree_map
        mapped = pytree.tree_map(lambda x: seen.append(x) or ("was", x), tree)
        assert pytree.tree_map_only(int, lambda x: x + 1, tree) == only
        assert pytree.tree_map(lambda x, y: (x, y), (1, [2]), (3, [4])) == pairs
        assert pytree.tree_map(str, (1, [2]), is_leaf=lambda x: isinstance(x, list)) == stopped
    assert own is pytree.tree_map
    assert mapped == right
    assert seen == order
    assert [*mapped] == [*right]
    assert (type(mapped["a"]), type(mapped["b"][2])) == (OrderedDict, Pair)


def test_a_graph_gets_its_code_when_it_is_asked_for():
    compiled: list[str] = []
    with pytest.MonkeyPatch.context() as patch, quick_graphs():
        write = torch.fx.Graph.python_code
        patch.setattr(torch.fx.Graph, "python_code", lambda *a, **k: compiled.append("") or write(*a, **k))
        made = make_fx(lambda x: (x + 1).relu())(torch.empty(3))
        assert not compiled
    assert made(torch.full((3,), -3.0)).tolist() == [0.0] * 3
    assert "relu" in made.code


def _view_of_what_is_written(x: torch.Tensor) -> torch.Tensor:
    with fx_traceback.annotate({"module": "early"}):
        y = x + 1
        view = y.view(-1)
    with fx_traceback.annotate({"module": "late"}):
        y.mul_(2)
        return view.neg() + x.view(-1)


def _graph(function: Any) -> list[tuple[Any, ...]]:
    with fx_traceback.preserve_node_meta():
        made = make_fx(dispatch_functionalize(function))(torch.ones(2, 3))
    nodes = list(made.graph.nodes)
    assert all("tensor_meta" in n.meta for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return [(n.name, str(n.target), str(n.args), n.meta.get("custom")) for n in nodes]


def test_a_view_that_is_made_again_after_a_write_is_noted_where_it_was_made_first():
    right = _graph(_view_of_what_is_written)
    with quick_graphs():
        quick = _graph(_view_of_what_is_written)
    assert quick == right
    views = [note for name, _, _, note in quick if name.startswith("view")]
    assert views == [{"module": "early"}, {"module": "early"}, {"module": "late"}]


@pytest.mark.skipif(release() < (2, 13), reason="torch does not say so yet")
def test_a_stranger_that_requires_a_gradient_is_refused_in_torch_s_words():
    mode = FunctionalTensorMode()
    with mode:
        stranger = FunctionalTensor.to_functional(torch.ones(2, 3, requires_grad=True))
    with quick_graphs(), pytest.raises(RuntimeError, match="in tensor_tracker"):
        _graph(lambda x: x * stranger)


class _Calling(torch.nn.Module):
    """Makes a graph of another module while it is itself being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = [n.op for n in torch.fx.symbolic_trace(self.inner).graph.nodes]
        return self.inner(x)


def test_modules_are_called_as_they_are_but_for_a_trace_inside_of_the_trace() -> None:
    model, seen = _Calling(), []
    call = torch.nn.Module.__call__
    model.inner.register_forward_hook(lambda *_: seen.append(torch.nn.Module.__call__))
    with quick_graphs():
        quick = make_fx(model)(torch.ones(2, 3))
    assert seen == [call]
    assert model.made == ["placeholder", "call_module", "call_module", "output"]
    right = make_fx(model)(torch.ones(2, 3))
    assert [str(n.target) for n in quick.graph.nodes] == [str(n.target) for n in right.graph.nodes]
    assert torch.nn.Module.__call__ is call


def test_the_state_of_random_ops_is_tracked_where_they_become_ops_of_it() -> None:
    own = aot_autograd.PhiloxStateTracker
    with quick_graphs():
        assert aot_autograd.PhiloxStateTracker is not own
    with functorch_config.patch(functionalize_rng_ops=True), quick_graphs():
        assert aot_autograd.PhiloxStateTracker is own
