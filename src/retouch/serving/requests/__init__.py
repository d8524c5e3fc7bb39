"""``limits``, ``decoding`` and ``single_score``, which are one module of the wing ``retouch_serve`` now. Nothing in this repository
may import this package.
"""

import sys
from importlib import import_module

for _name in ("limits", "decoding", "single_score"):
    sys.modules[f"{__name__}.{_name}"] = import_module("retouch_serve.requests")
