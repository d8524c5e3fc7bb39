"""``python -m retouch``."""

import sys

from retouch.cli import main

sys.exit(main())
