"""Runs a command, and kills its process group when the other end of stdin is closed: no engine outlives its parent.

python supervisor.py COMMAND ARGUMENTS
"""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def end_with_input(descriptor: int) -> None:
    """Start a thread that kills this process group when the other end of a pipe is closed. The thread never reads."""
    poller = select.poll()
    poller.register(descriptor, 0)  # a hang-up is always reported

    def wait() -> None:
        poller.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_input(sys.stdin.fileno())
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())  # lets the command end in its own way
    status = child.wait()
    if status < 0:  # a signal ended the command: end by the same one
        with suppress(OSError):  # SIGKILL needs and takes no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
