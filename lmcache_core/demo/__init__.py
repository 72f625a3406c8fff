"""A demonstration on real input: a small model, a long document, and what reusing its prefix saves.

The work is done in processes of their own (`lmcache_core.demo.worker`), one before and one after a restart; this side
shows progress, compares and reports.
"""

from lmcache_core.demo.options import DemoOptions, add_arguments
from lmcache_core.demo.result import DemoResult, Measured
from lmcache_core.demo.run import run_demo

__all__ = ["DemoOptions", "DemoResult", "Measured", "add_arguments", "run_demo"]
