"""What PEFT knows of gated models: FTG, the default target modules of its own methods, and a card.

PEFT is slow to import, and `import hf_moa` does not wait for it: PEFT is told at once where it is
imported already, and otherwise at the end of its import, by whatever code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .modeling.core.family import Family


def register_with_peft(families: Mapping[str, Family]) -> None:
    """Tell PEFT now, or as soon as it is imported.

    Args:
        families: those of gated models, as they are when PEFT is told.
    """
    register = partial(_register, families)
    if "peft" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterImport("peft", register))


def register_target_modules(model_type: str, backbone: str) -> None:
    """Let PEFT's methods (LoRA, IA3, ...) do without `target_modules` on a gated model.

    What PEFT itself may know of the model stays. (MoA's experts are no linear layers, which a table may
    name: `LoraConfig.target_parameters` takes them. The feed-forward layers of sparse MoE, and of CCT
    with its norms, have modules of other names than a table's.)

    Args:
        model_type: the gated model's, such as "moa_bert".
        backbone: that of transformers' own model, such as "bert".
    """
    from peft.utils import constants

    for name, table in vars(constants).items():
        if name.endswith("_MODULES_MAPPING") and isinstance(table, dict) and backbone in table:
            table.setdefault(model_type, table[backbone])


def _register(families: Mapping[str, Family]) -> None:
    from .modeling.ftg import model  # noqa: F401 - registers FTG
    from .pushed_cards import write_cards_of_adapters

    write_cards_of_adapters()
    for family in families.values():
        register_target_modules(family.config_class.model_type, family.model_type)


class _AfterImport(MetaPathFinder):
    """Finds a package as the other finders do, and calls a function once it is imported.

    Args:
        name: of the package.
        function: what to call.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        specs = (
            finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self
        )
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # not again where the package is reloaded
                sys.meta_path.remove(self)
                self.function()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]  # of this one loader
        return spec
