"""How a part started by `dev` learns that `dev` is gone, and tells it that it is up: two inherited pipe ends.

The lifeline's write end lives in `dev` alone: when `dev` ends, however it does, every part reads EOF and stops.
"""

import os
import select
import signal
import threading
from collections.abc import Callable


def announce(fd: int | None) -> Callable[..., None] | None:
    """What to call with the address once this part works: it writes one line to `fd`."""
    if fd is None:
        return None

    def ready(address: object = "") -> None:
        try:
            os.write(fd, f"{address or ''}\n".encode())
        except BrokenPipeError:
            return  # whoever started us is gone: the lifeline says so, too
        finally:
            os.close(fd)

    return ready


def end_with(fd: int | None) -> None:
    """Ends this process gracefully (SIGTERM to itself) when the other end of the lifeline is closed."""
    if fd is None:
        return

    def watch() -> None:
        # All parts share the pipe, and one of them may have made it non-blocking for all: wait first, then read.
        select.select([fd], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
