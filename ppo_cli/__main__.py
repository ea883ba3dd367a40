"""`python -m ppo_cli` is `ppo`."""

import sys

from ppo_cli.cli.app import main

# The exit code of the command is that of the process.
if __name__ == "__main__":
    sys.exit(main())
