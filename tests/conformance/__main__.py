"""Runs PyTorch's own RPC test suite: ``python tests/conformance --help``."""

from torch_suite.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
