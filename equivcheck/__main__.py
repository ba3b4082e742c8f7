"""`python -m equivcheck` is the command `equivcheck`."""

import sys

from equivcheck.cli import main

sys.exit(main())
