"""`python -m grpo_mc` is the program `grpo-mc`."""

import sys

from grpo_mc.cli import main

if __name__ == "__main__":
    sys.exit(main())
