"""``python -m cuckpt``: the command line."""

import sys

from cuckpt.cli import main

sys.exit(main())
