"""``schema``, under the name by which scripts outside of this repository import it; the wire format is in the wing
``retouch_serve``. Nothing in this repository may import this package.
"""

import sys
from importlib import import_module

sys.modules[f"{__name__}.schema"] = import_module("retouch_serve.wire")
