"""`python -m benchmarks.vllm`: see `ttft`."""

from benchmarks.vllm.ttft import main

if __name__ == "__main__":
    main()
