"""tsae: what changed inside a language model trained with verifiable rewards, and which training samples did that.

The public names stand in ``__init__.pyi``, where editors and type checkers find their types. Each is loaded when it is
first used, so that `import tsae` imports neither torch nor transformers. Functions run whatever the caller's settings
of torch and numpy are (`tsae.base.usual_state`).
"""

from importlib.metadata import version
from inspect import isroutine
from typing import Any

import lazy_loader

from tsae.base.usual_state import in_usual_state

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("tsae")
    found = _load(name)
    globals()[name] = found = in_usual_state(name, found) if isroutine(found) else found
    return found
