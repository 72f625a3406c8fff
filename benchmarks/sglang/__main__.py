"""`python -m benchmarks.sglang`: see `pages`."""

from benchmarks.sglang.pages import main

if __name__ == "__main__":
    main()
