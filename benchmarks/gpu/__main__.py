"""`python -m benchmarks.gpu`: see `check`."""

from benchmarks.gpu.check import main

if __name__ == "__main__":
    raise SystemExit(main())
