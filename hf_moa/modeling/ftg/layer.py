"""The layer of FTG: a module, and copies of it that adapters train in its place."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

# In a `try`, so that a checkpoint's code loads where PEFT is not installed.
try:
    from peft.tuners.tuners_utils import (
        BaseTunerLayer,
        _get_in_out_features,
        check_adapters_to_merge,
    )
except ImportError:
    raise

from ..core.precision import autocasts
from .config import FTGConfig


class FTGLayer(nn.Module, BaseTunerLayer):
    """Runs the active adapter's copy of a module instead of the module.

    The base and inactive copies are always in eval mode: their running statistics never move. A copy in
    another dtype than its inputs (float32 beside a bfloat16 base) is computed in its own.

    Args:
        base_layer: the module.
        adapter_name: name of the first adapter.
        config: its `FTGConfig`.
    """

    adapter_layer_names = ("ftg_modules",)
    in_features: int | None
    out_features: int | None

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: FTGConfig):
        super().__init__()
        self.base_layer = base_layer
        self.ftg_modules = nn.ModuleDict()
        self.merged_adapters = []
        self._unmerged_base: list[nn.Module] = []  # in a list, so that it is no submodule
        self._active_adapter = adapter_name
        with warnings.catch_warnings():  # PEFT says of every gate that it does not know its kind
            warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            self.in_features, self.out_features = _get_in_out_features(base_layer)
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: FTGConfig) -> None:
        """Add an adapter: a copy of the base, with its weights (or, for tests, others)."""
        if self.merged:
            self.unmerge()
        copy = deepcopy(self.get_base_layer())
        if not config.init_weights:
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in copy.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, parameter)  # which `low_cpu_mem_usage` listens to
        self.ftg_modules[adapter_name] = copy
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self.active_module()
        if module is self.base_layer:
            return module(*args, **kwargs)
        dtype = next((p.dtype for p in module.parameters()), None)
        # an embedding is given integers: then the base says what comes out
        base = next((p.dtype for p in self.base_layer.parameters()), None)
        given = next((x.dtype for x in args if _is_floating(x)), base)
        if None in (dtype, given) or autocasts(_device_type(args)):
            return module(*args, **kwargs)
        told = [value for value in kwargs.values() if isinstance(value, torch.dtype)]  # to compute in
        if all(each == dtype for each in (given, *told)) or self._has_dtypes_of_base(module):
            return module(*args, **kwargs)
        args = tuple(x.to(dtype) if _is_floating(x) else x for x in args)
        kwargs = {k: dtype if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        output = module(*args, **kwargs)
        return output.to(given) if isinstance(output, Tensor) else output

    def _has_dtypes_of_base(self, copy: nn.Module) -> bool:
        """Whether the copy, too, is bfloat16 but for the norms, which always stay float32."""
        pairs = zip(copy.parameters(), self.base_layer.parameters(), strict=False)
        return all(mine.dtype == base.dtype for mine, base in pairs)

    def active_module(self) -> nn.Module:
        """The module that runs: the active adapter's copy, or the base."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [name for name in self.active_adapters if name in self.ftg_modules]
        if self.disable_adapters or self.merged or not names:
            return self.base_layer
        if len(names) > 1:
            raise ValueError(
                f"FTG runs one adapter at a time (got {', '.join(names)}): they are copies of the same "
                "gates. Choose one with set_adapter."
            )
        return self.ftg_modules[names[0]]

    def train(self, mode: bool = True) -> FTGLayer:
        super().train(mode)
        runs_copies = mode and not self.disable_adapters and not self.merged
        self.base_layer.eval()
        for name, module in self.ftg_modules.items():
            module.train(runs_copies and name in self.active_adapters)
        return self

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_names, inference_mode=inference_mode)
        self.train(self.training)

    def enable_adapters(self, enabled: bool) -> None:
        super().enable_adapters(enabled)
        self.train(self.training)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the adapter's weights instead of the base's; `unmerge` brings those back.

        Raises:
            ValueError: several adapters; with `safe_merge`, weights that are not finite.
        """
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.ftg_modules]
        if not names:
            return
        if len(names) > 1 or self.merged:
            raise ValueError(
                f"FTG merges one adapter (got {', '.join([*self.merged_adapters, *names])}): they are "
                "copies of the same gates."
            )
        copy = deepcopy(self.ftg_modules[names[0]])
        if safe_merge and not all(p.isfinite().all() for p in copy.parameters()):
            raise ValueError(
                f"NaNs detected in the merged weights. The adapter {names[0]} seems to be broken: not "
                "all of its weights are finite."
            )
        originals = dict(self.base_layer.named_parameters())
        for name, parameter in copy.named_parameters():
            parameter.data = parameter.data.to(originals[name].dtype)
            parameter.requires_grad_(originals[name].requires_grad)
        self._unmerged_base = [self.base_layer]
        self.base_layer = copy
        self.merged_adapters.append(names[0])
        self.train(self.training)

    def unmerge(self) -> None:
        """Bring back the base as it was, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self.base_layer = self._unmerged_base.pop()
        self.merged_adapters.clear()
        self.train(self.training)

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """As PEFT's, which `low_cpu_mem_usage` calls; but the copy keeps its dtype, float32 beside a
        bfloat16 base, where PEFT rounds what was loaded."""
        if adapter_name not in self.ftg_modules:
            return
        copy = self.ftg_modules[adapter_name]
        base = next(self.get_base_layer().parameters(), None)
        if base is not None and not any(parameter.is_meta for parameter in copy.parameters()):
            copy.to(base.device if device is None else device)

    def _apply(self, *args: Any, **kwargs: Any) -> FTGLayer:
        # casts and moves reach the base that a merged adapter stands for, too
        for module in self._unmerged_base:
            module._apply(*args, **kwargs)
        return super()._apply(*args, **kwargs)

    @property
    def weight(self) -> Tensor:
        """Of the module that runs, for those who look."""
        weight: Any = self.active_module().weight
        return weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]  # `PEFT` has a plain attribute
        bias: Any = self.active_module().bias
        return bias

    def __repr__(self) -> str:
        return "ftg." + super().__repr__()


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _device_type(args: tuple) -> str:
    return next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
