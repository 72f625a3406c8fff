"""`python -m lmcache_core` is the command `lmcache-core`."""

import sys

from lmcache_core.cli import main

sys.exit(main())
