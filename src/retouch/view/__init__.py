"""``retouch view``: a local web page that follows the runs in a folder; and ``retouch.view(run)`` for notebooks.

It reads the files that a run writes, so the trainer never waits for it and never knows about it. ``tail`` follows a file of
JSON lines, ``live_run`` reads one run's folder again and again, ``catalogue`` finds the runs of a folder and the files that may be
served, ``judged`` reads the answers of judges in a ledger, ``thumbnails`` makes small images, ``gate`` checks who asks, ``bodies``
reads what the page sends, ``app`` has the endpoints, and ``command`` starts the server. With options, ``control`` records requests
to runs, and ``trying`` lets ``trial_worker`` make images. The page is in ``static``: plain JavaScript modules and no library, so
nothing is built and nothing is loaded from other sites. ``inline`` makes the static page.

May import ``session`` and everything below it.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """``retouch.view`` is this package and, called with a run, ``retouch.view.inline.view``."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        from retouch.view.inline import view

        return view(*given, **named)


sys.modules[__name__].__class__ = _CallableModule
