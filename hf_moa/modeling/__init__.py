"""Configurations, backbones and mechanisms, a folder each.

Importing this package loads the code of every declared mechanism, which fills the slots that layers ask.
"""

from importlib import import_module

from .config import gating as _gating  # noqa: F401 - declares them
from .core.mechanism import MECHANISMS

for _mechanism in MECHANISMS.values():
    for _path in _mechanism.code:
        import_module("." + _path.removesuffix(".py").replace("/", "."), __name__)
