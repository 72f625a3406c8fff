"""The command."""

from lmcache_core.testing.simulation.runner import main

if __name__ == "__main__":  # which processes that it starts import as well
    raise SystemExit(main())
