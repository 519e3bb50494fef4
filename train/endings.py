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
    """Within it SIGTERM raises `Terminated`, so that what is half done is cleared away; once, and in this process.

    Of several processes under a launcher each ends as it would without us: one that waits for the others, inside a
    collective operation, would never come to raise anything.
    """
    ours = threading.current_thread() is threading.main_thread() and os.environ.get("WORLD_SIZE", "1") == "1"
    if not ours or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only a main thread may set handlers, and somebody else's stays
        return
    owner, received = os.getpid(), 0

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        # A forked worker ends as it would without us. So do we at the third: the first was lost, as in a `__del__`.
        if os.getpid() != owner or received > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif received == 1:  # `timeout` sends it twice: the second must not stop the clearing
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
    except (AttributeError, OSError):  # closed before we began, or no stream of the system's
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)  # macOS reports nothing where nothing is asked for
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # what is flushed at exit must not fail again
    return True
