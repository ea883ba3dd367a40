"""`python -m ppo_cli` is `ppo`."""

import sys

from ppo_cli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
