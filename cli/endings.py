"""Ends that come from outside: SIGTERM, and a reader of the output that has gone. Imports nothing heavy."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM: whoever cleans up after Ctrl-C does so after it as well."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM raises `Terminated`, so that what is half done is cleared away; once, and in this process."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only a main thread may set handlers, and somebody else's stays
        return
    owner = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker, which ends as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second must not stop the clearing
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def reader_has_gone() -> bool:
    """Whether nothing reads what we print any more (`| head`); what is left is then dropped."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # no stream of the system's
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not poll.poll(0):  # only errors and hang-ups are reported
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # what is flushed at exit must not fail again
    return True
