"""Make torchvision importable beside a torch for which its compiled ops cannot load.

torchvision's wheels are built against a CUDA torch; beside a CPU-only one the compiled library is refused, and
`import torchvision` then fails because the package describes ops that nobody has defined. The model definitions
use none of those ops, so declaring the missing signatures is enough. Where the real ops load, nothing is done.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

from traces.errors import EnvironmentProblem

SIGNATURES: Final = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept: list[Any] = []  # a torch.library.Library withdraws its definitions when it is collected


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the signatures of its missing ops if it fails for want of them.

    Raises:
        EnvironmentProblem: torchvision is not installed, or does not fit this torch for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"torchvision cannot be imported ({error}); install it with: pip install 'lowtide[torch]'"
        ) from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise _misfit(error) from error
    # The failed import leaves submodules behind, which would be taken for complete ones.
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    _declare_missing_ops()
    try:
        return importlib.import_module("torchvision")
    except (RuntimeError, ImportError) as error:
        raise _misfit(error) from error


def _declare_missing_ops() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, signature in SIGNATURES.items():
        try:
            getattr(torch.ops.torchvision, name)
        except AttributeError:
            library.define(signature)
    _kept.append(library)


def _misfit(error: Exception) -> EnvironmentProblem:
    import torch

    return EnvironmentProblem(
        f"torchvision does not work with torch {torch.__version__} ({error}); install versions that belong "
        "together: pip install --upgrade 'lowtide[torch]'"
    )
