"""``python -m retouch.cli``."""

import sys

from retouch.cli import main

sys.exit(main())
