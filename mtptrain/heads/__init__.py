"""All heads by name. To add one, see docs/add_a_head.md."""

from importlib import import_module

from mtptrain.heads.base import Head
from mtptrain.settings.heads import HEAD_CONFIGS


def _class_at(path: str) -> type[Head]:
    module, _, name = path.partition(":")
    kind: type[Head] = getattr(import_module(module), name)
    return kind


HEADS = {name: _class_at(config.implementation) for name, config in HEAD_CONFIGS.items()}
