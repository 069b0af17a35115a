"""Makes the models known to transformers' auto classes, plain classes and pipelines, and to PEFT; and
their pushes write a card.

`import hf_moa` does this, and so imports every model: the auto classes take classes; names they take
only of transformers' own. It cannot wait until the auto classes are imported:
`transformers.modeling_layers` does that while the code of BERT, on which the gated BERT builds, is half
imported.
"""

import sys

import transformers

from .families import FAMILIES
from .modeling.checkpoint_code import write_code
from .modeling.core.family import Family
from .peft_registration import register_target_modules, register_with_peft
from .pipelines import register_pipelines
from .plain_classes import load_as_gated
from .pushed_cards import write_cards_of_pushes


def register_family(family: Family) -> None:
    """Make a backbone from outside the package known: to this package, transformers' auto and plain
    classes, and PEFT; and its checkpoints carry its code."""
    FAMILIES[family.model_type] = family
    _register(family)
    if "peft" in sys.modules:
        register_target_modules(family.config_class.model_type, family.model_type)


def _register(family: Family) -> None:
    """Make a family known to transformers, and its checkpoints carry its code."""
    config_class = family.config_class
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.write_code = write_code
    for auto_name, model_name in config_class.auto_classes.items():
        model_class = getattr(family.models, model_name)
        getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
    tokenizer_class = getattr(transformers, family.tokenizer)
    transformers.AutoTokenizer.register(config_class, tokenizer_class, exist_ok=True)
    for name in family.tasks.values():  # `transformers serve` looks there, by `config.architectures`
        # not the module above: while it is imported, transformers puts another one in its place
        setattr(sys.modules["transformers"], f"Moa{name}", family.gated_class(name))
    load_as_gated(family)
    # adapters of version 0.1 name the module of their base so
    sys.modules[f"hf_moa.modeling.modeling_{config_class.model_type}"] = family.models


for _family in FAMILIES.values():
    _register(_family)
register_pipelines()
write_cards_of_pushes()
register_with_peft(FAMILIES)
