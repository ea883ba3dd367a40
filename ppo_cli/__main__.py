"""`python -m ppo_cli` is `ppo`."""

# Built-in modules: a Ctrl-C during an import here would print a traceback.
import _signal  # type: ignore[import-not-found]


def run() -> None:
    """Run `ppo` and end the process, with the exit code of the command.

    Until its modules are imported, Ctrl-C ends the process without a traceback.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    # What started this process may have held a Ctrl-C back until here.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])
    import atexit
    import threading

    from ppo_cli.cli.app import main
    from ppo_cli.signals import leave, leave_at_once, watch_interrupts

    try:
        watch_interrupts()
        code = main()
        # What Python itself does first at the end of a process.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        leave(code)
    except KeyboardInterrupt:
        leave_at_once()
        raise


if __name__ == "__main__":
    run()
