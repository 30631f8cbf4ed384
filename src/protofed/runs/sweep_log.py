"""What the processes of a sweep have to say. Their parent says it, each message once: many runs read the same files."""

import logging
import multiprocessing
import threading
from multiprocessing.context import SpawnContext
from types import TracebackType
from typing import Self, TypeAlias

Message = tuple[int, str, str]
"""Level, logger and text."""
Messages: TypeAlias = "multiprocessing.Queue[Message | None]"
WAIT = 2.0
"""Seconds for the last messages. A process that was killed while it wrote leaves half of one, which never ends."""


class Listener:
    """Hears the processes of a sweep."""

    def __init__(self, context: SpawnContext) -> None:
        self.messages: Messages = context.Queue()
        self._said: set[Message] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.messages.put(None)
        self._thread.join(WAIT)
        self.messages.cancel_join_thread()
        self.messages.close()

    def _listen(self) -> None:
        while (message := self.messages.get()) is not None:
            self.say(message)

    def say(self, message: Message) -> None:
        level, name, text = message
        if message not in self._said:
            self._said.add(message)
            logging.getLogger(name).log(level, "%s", text)


class _Teller(logging.Handler):
    def __init__(self, messages: Messages) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.put((record.levelno, record.name, self.format(record)))


def tell_parent(messages: Messages) -> None:
    """From now on this process logs through its parent. It never waits for the parent to listen."""
    messages.cancel_join_thread()
    logging.getLogger().handlers = [_Teller(messages)]
