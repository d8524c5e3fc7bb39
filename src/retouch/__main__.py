"""``python -m retouch``."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]  # Python puts the current folder first, and a file in it would be imported in place of a package

from retouch.cli import main

sys.exit(main())
