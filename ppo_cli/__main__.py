"""`python -m ppo_cli` is `ppo`."""

import signal
import sys


def run() -> int:
    """Run `ppo`. Until its modules are imported, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ppo_cli.cli.app import main
    from ppo_cli.signals import watch_interrupts

    watch_interrupts()
    return main()


# The exit code of the command is that of the process.
if __name__ == "__main__":
    sys.exit(run())
