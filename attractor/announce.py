"""What is saved becomes known to the Auto classes of transformers once these are imported, and not before."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO = "transformers.models.auto."
PARTS = ("configuration_auto", "modeling_auto", "tokenization_auto")


def announce() -> None:
    """Let the Auto classes read saved retrofits and GPTs: at once where they were imported, or else then."""
    for part in PARTS:
        if AUTO + part in sys.modules:
            _register(part, sys.modules[AUTO + part])
    sys.meta_path.insert(0, WhenImported())


class WhenImported(MetaPathFinder):
    """Finds the modules of the Auto classes where they are, and has each of them followed by `_register`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        part = name.removeprefix(AUTO)
        if part == name or part not in PARTS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(part, module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(part: str, module: ModuleType) -> None:
    """A release of transformers that this package cannot use is told, and works on without it."""
    try:
        import_module("attractor.hf.known").register(part, module)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"transformers will not read what attractor saves, for {error}: "
            'pip install "attractor-patch-networks[hf]"',
            stacklevel=2,
        )
