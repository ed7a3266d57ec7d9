"""tsae: what changed inside a language model trained with verifiable rewards, and which training samples did that.

The public names stand in ``__init__.pyi``, where editors and type checkers find their types. Each is loaded when it is
first used, so that `import tsae` imports neither torch nor transformers.
"""

from importlib import import_module

import lazy_loader

from tsae.base.views import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Results show themselves through the report, which is imported when the first one does.
register(lambda: import_module("tsae.report.door"))
