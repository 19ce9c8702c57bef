"""Drop-in layer norm, RMS norm and batch norm (+ leaky ReLU) that save their output, as long as their weights allow it.

The normalized input is (y - bias) / weight, so that what y was rounded by is divided by the weight (Rota Bulò, Porzi
and Kontschieder, In-Place Activated BatchNorm, arXiv:1712.02616). Where a weight is small, or small beside its bias,
the ordinary norm runs. So it does under autocast, which lets the next layer save a copy in another type, and under
torch.compile, which chooses itself what to save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

# The least weight, and how many times larger than it its bias may be.
LIMITS = {torch.float32: (0.05, 64.0), torch.float16: (0.1, 4.0), torch.bfloat16: (0.1, 4.0)}
CHECKED_EVERY = 100  # forwards on a GPU, where to look at the weights means to wait for them


def obstacle(weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype) -> str:
    """Why a norm with these parameters cannot be computed back from outputs of a type; nothing: it can."""
    if dtype not in LIMITS:
        return f"outputs of {dtype} are not computed back"
    least, times = LIMITS[dtype]
    if weight is None:
        return ""
    size = weight.detach().abs()
    found = torch.stack(
        [size.min(), (torch.zeros_like(size) if bias is None else bias.detach().abs() / size).max()]
    )
    smallest, ratio = found.tolist()
    if not smallest > least:
        return f"its smallest weight is {smallest:.2g}, not above {least}"
    return "" if ratio <= times else f"a bias is {ratio:.3g} times its weight, more than {times:g}"


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape = shape
        ctx.save_for_backward(y, rstd, weight, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        y, rstd, weight, bias = ctx.saved_tensors
        x = _centred(y, rstd, weight, bias)
        needed = list(ctx.needs_input_grad[:3])
        made = torch.ops.aten.native_layer_norm_backward(
            grad, x, ctx.shape, torch.zeros_like(rstd), rstd, weight, bias, needed
        )
        return *made, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, shape: Any, eps: float | None) -> torch.Tensor:
        y, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.dims = len(shape)
        ctx.save_for_backward(y, rstd, weight)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        # In torch's passes: its fused backward is there for CUDA alone.
        y, rstd, weight = ctx.saved_tensors
        grad, x = grad.float(), y.float()
        over = grad
        if weight is not None:
            x, over = x / weight, grad * weight
        dims = tuple(range(-ctx.dims, 0))
        made = rstd * (over - x * (over * x).mean(dims, keepdim=True))
        of_weight = None if weight is None else (grad * x).sum_to_size(weight.shape).to(weight.dtype)
        return made.to(y.dtype), of_weight, None, None


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, norm: Any) -> torch.Tensor:
        y, _, rstd = torch.native_batch_norm(
            x, weight, bias, norm.running_mean, norm.running_var, True, norm.momentum, norm.eps
        )
        y = y if norm.slope is None else functional.leaky_relu_(y, norm.slope)
        ctx.slope, ctx.eps = norm.slope, norm.eps
        ctx.save_for_backward(y, rstd, weight, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        y, rstd, weight, bias = ctx.saved_tensors
        if ctx.slope is not None:
            grad = torch.ops.aten.leaky_relu_backward(grad, y, ctx.slope, True)
            y = torch.where(y < 0, y / ctx.slope, y)
        channel = (-1, *(1 for _ in y.shape[2:]))
        parts = (None if t is None else t.view(channel) for t in (rstd, weight, bias))
        made = torch.ops.aten.native_batch_norm_backward(
            grad, _centred(y, *parts), weight, None, None, torch.zeros_like(rstd), rstd, True, ctx.eps,
            list(ctx.needs_input_grad[:3]),
        )  # fmt: skip
        return *made, None


def _centred(y: torch.Tensor, rstd: Any, weight: Any, bias: Any) -> torch.Tensor:
    """The norm's input without its mean, in y's type, computed in float32."""
    x = y.float() if bias is None else y.float() - bias
    return (x / (rstd if weight is None else rstd * weight)).to(y.dtype)


class _Guarded(nn.Module):
    """A norm that looks at its weights: in every forward on the CPU, in every hundredth on a GPU, and when loaded."""

    weight: Any
    bias: Any
    _forwards = 0
    _obstacle = ""

    def _can(self, x: torch.Tensor) -> bool:
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return False
        if not (
            torch.is_grad_enabled()
            and (x.requires_grad or (self.weight is not None and self.weight.requires_grad))
        ):
            return False
        if self.weight is not None and self.weight.dtype != x.dtype:
            return False
        if not x.is_cuda or self._forwards % CHECKED_EVERY == 0:
            self._obstacle = obstacle(self.weight, self.bias, x.dtype)
        self._forwards += 1
        return not self._obstacle

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._forwards = 0


class LayerNorm(_Guarded, nn.LayerNorm):
    """`torch.nn.LayerNorm`, from its output."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._can(input):
            return _LayerNorm.apply(input, self.weight, self.bias, self.normalized_shape, self.eps)
        return super().forward(input)


class RMSNorm(_Guarded, nn.RMSNorm):
    """`torch.nn.RMSNorm`, from its output."""

    bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._can(x):
            return _RMSNorm.apply(x, self.weight, self.normalized_shape, self.eps)
        return super().forward(x)


class _BatchNormFromOutput(_Guarded):
    """Of a batch's own statistics; `slope`: that of the leaky ReLU that it is one with."""

    slope: float | None = None
    momentum: float | None
    num_batches_tracked: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and self.momentum is not None and self._can(input):
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            return _BatchNorm.apply(input, self.weight, self.bias, self)
        y = super().forward(input)
        return y if self.slope is None else functional.leaky_relu(y, self.slope)


class BatchNorm1d(_BatchNormFromOutput, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, from its output."""


class BatchNorm2d(_BatchNormFromOutput, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, from its output."""


class BatchNorm3d(_BatchNormFromOutput, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, from its output."""
