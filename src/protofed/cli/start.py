"""Where the command begins. Ctrl-C while modules are imported ends it quietly: there is nothing to save yet."""

import os
import signal
from types import FrameType

IMPORTS = "<frozen importlib._bootstrap>"


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job of a shell ignores it
        signal.signal(signal.SIGINT, _interrupted)  # guard: imports-end-quietly
    from protofed.cli import app

    app.main()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """An exception in the middle of an import may come out as another one, with pages of traceback."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTS:
            os.write(2, b"\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
