"""Run the command line of `meshwise`, for `python -m meshwise` and `torchrun -m meshwise`."""

import sys

from meshwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
