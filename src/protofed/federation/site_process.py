"""A site as a long-lived process: takes orders from the server, has them done, and sends the answers."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from protofed.errors import BadInput
from protofed.federation import keys
from protofed.federation.codec import Undecodable, decoded, encoded
from protofed.federation.flower.outcomes import BadParcel, Delivery, OtherServer, RunOver, Turned, Unreachable
from protofed.federation.interface import Handler
from protofed.federation.messages import Answer, Failed, Notice, Order, Verdict
from protofed.federation.policy import SiteSettings
from protofed.federation.processes import OutOfTime, Worker, WorkerDied
from protofed.federation.signing import BadSignature, Header, OutOfDate, Seen, Signed, signed, verified
from protofed.federation.site_store import SiteFolder
from protofed.printable import one_line
from protofed.runs.store import disk, opening
from protofed.runtimes.jobs import Reason

POLLS = 0.1
"""Seconds between two questions for orders, while there are some."""
POLLS_IDLE = 1.0
"""The same when there was none for a while."""
IDLE_AFTER = 30.0
LONGEST_PAUSE = 15.0
"""Seconds until a server that is not there is tried again."""
REFUSALS_UNTIL_SAID = 4
"""Times that a site is not let in until it says so: a server that has just started does not know its keys yet."""
MOST_REFUSALS_LOGGED = 10_000


class Fleet(Protocol):
    """The connection to the SuperLink. `flower.fleet.Fleet` is one."""

    node: int

    def activate(self, before: int) -> None: ...
    def deactivate(self) -> None: ...
    def beat(self) -> None: ...
    def order(self, most_bytes: int) -> Delivery | None: ...
    def answer(self, delivery: Delivery, message: Signed) -> None: ...
    def close(self) -> None: ...


class Stopped(Exception):
    """The site was asked to stop."""


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Refuses to be the second process of a site: two of them would take orders from one another."""
    keys.private_folder(folder)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: federation-no-twin
    except BlockingIOError:
        raise BadInput(f"another process works in {folder}: a site is one process") from None
    else:
        yield
    finally:
        os.close(handle)


@dataclass
class SiteProcess:
    settings: SiteSettings
    handler: Handler
    connect: Callable[[], Fleet]
    tell: Callable[[str], None]
    should_stop: Callable[[], bool] = lambda: False
    _said: str = field(default="", init=False)
    _refused: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._key = self.settings.private_key()
        self._server = keys.read_public_key(self.settings.server_key)
        self._seen = Seen(self.settings.state / "orders.seen")
        self._worker = Worker(self.handler.handle, self._beat)
        self._fleet: Fleet | None = None

    def run(self) -> None:
        """Takes part until it is asked to stop."""
        pause, refused = POLLS, 0
        try:
            while True:
                try:
                    self._take_part()
                except (Unreachable, Turned) as error:
                    was_in = self._fleet is not None
                    refused = refused + 1 if isinstance(error, Turned) and not was_in else 0
                    if not 0 < refused < REFUSALS_UNTIL_SAID:  # guard: server-that-starts-is-given-time
                        self._say(self._words(error))
                    if was_in or refused == 1:  # it was there a moment ago, or has just come
                        pause = POLLS
                    # An order may have been lost on its way here. A site that comes anew is asked again.
                    self._disconnect()  # guard: federation-lost-orders-asked-again
                    pause = min(pause * 2, LONGEST_PAUSE)
                    self._sleep(pause)
        except Stopped:
            pass
        finally:
            self._worker.close()
            self._leave()

    def _take_part(self) -> None:
        fleet = self._connected()
        last = time.monotonic()
        while True:
            self._check_stop()
            fleet.beat()
            try:
                delivery = fleet.order(self.settings.policy.most_bytes)
            except BadParcel as error:
                self._refuse(str(error))
                continue
            except RunOver:
                continue
            self._said = ""
            if delivery is not None:
                self._do(delivery, fleet)
                last = time.monotonic()
            else:
                self._sleep(POLLS if time.monotonic() - last < IDLE_AFTER else POLLS_IDLE)

    def _connected(self) -> Fleet:
        """The connection. Whenever it is a new one, the server sends again what it waits for."""
        if self._fleet is None:
            fleet = self.connect()
            try:
                fleet.activate(self._last_node())
            except BaseException:
                fleet.close()
                raise
            self._fleet = fleet
            self._keep_node(fleet.node)
            self.tell(f"connected to {self.settings.site.server}")
        return self._fleet

    def _do(self, delivery: Delivery, fleet: Fleet) -> None:
        site, federation = self.settings.site.name, self.settings.site.federation
        message = delivery.message
        try:
            header = verified(message, self._server, "order", federation, delivery.run, site)
        except BadSignature as error:
            self._refuse(str(error))
            return
        what = self._named(message.body)
        begin = time.monotonic()
        answer = self._taken_up(header, message.body, what)
        if answer is None:
            self.tell(f"{what}: no answer")
            return
        for why in self._refusals(answer):
            self.tell(f"{what}: this site does not take part: {one_line(why)}")
        seconds = time.monotonic() - begin
        reply = signed(self._key, "answer", federation, delivery.run, site, header.nonce, answer, time.time())
        self.tell(f"{what}: done in {seconds:.1f} s, {len(answer)} bytes go")
        while True:
            try:
                fleet.answer(delivery, reply)
            except Unreachable as error:
                self._say(self._words(error))
                self._sleep(1.0)
            except RunOver:
                self.tell(f"{what}: its run has ended. The answer is kept, if the server asks for it again")
                return
            else:
                return

    def _taken_up(self, header: Header, data: bytes, what: str) -> bytes | None:
        """The answer to a message of the server; None to one that was taken up before, or is no question."""
        try:
            self._seen.take_up(header)
        except OutOfDate as error:  # guard: wrong-clock-said-to-server
            self._refuse(str(error))
            return self._failure(data, str(error))
        except BadSignature as error:
            self._refuse(str(error))
            return None
        except OSError as error:  # guard: full-disk-ends-no-site
            self.tell(f"{what}: {_cannot_write(error)}")
            return self._failure(data, _cannot_write(error))
        self.tell(f"{what}: {len(data)} bytes came")
        return self._answer(data)

    def _answer(self, data: bytes) -> bytes | None:
        begin = time.monotonic()
        try:
            return self._worker.answer(data, self.settings.policy.order_minutes * 60)
        except OutOfTime:
            why = f"this site works at one order for {self.settings.policy.order_minutes:g} minutes at most"
        except WorkerDied as error:
            why = str(error)
        self.tell(why)
        self._count(data, time.monotonic() - begin)
        return self._failure(data, why)

    def _count(self, data: bytes, seconds: float) -> None:
        """Time at an order that was ended counts for its run too. The process that would have written it down is
        gone."""
        try:
            order = decoded(data, self.settings.policy.most_bytes)
            if isinstance(order, Order) and (files := SiteFolder(self.settings.state)).agreed(order.ticket.run):
                files.add_seconds(order.ticket.run, seconds)  # guard: hours-of-orders-that-were-ended
        except (Undecodable, BadInput):
            pass  # none of a run that was agreed
        except OSError as error:
            self.tell(_cannot_write(error))

    def _failure(self, data: bytes, why: str) -> bytes | None:
        """The answer that none of an order's clients did it; None to what is no order."""
        try:
            order = decoded(data, self.settings.policy.most_bytes)
        except Undecodable:
            return None
        if not isinstance(order, Order):
            return None
        failed = tuple(Failed(work.client, Reason.CLIENT_ERROR, why) for work in order.works)
        return encoded(Answer(order.nonce, (), failed))

    def _refusals(self, answer: bytes) -> list[str]:
        """What the site's verdict refuses, if the answer is one."""
        try:
            message = decoded(answer, self.settings.policy.most_bytes)
        except Undecodable:
            return []
        return [f"{name}: {text}" for name, text in message.refusals] if isinstance(message, Verdict) else []

    def _named(self, data: bytes) -> str:
        """What was asked, in words."""
        try:
            message = decoded(data, self.settings.policy.most_bytes)
        except Undecodable:
            return "a message that cannot be read"
        if isinstance(message, Order):
            clients = f"{len(message.works)} clients" if len(message.works) != 1 else one_line(message.works[0].client)
            return f"round {message.ticket.round + 1}, {one_line(message.step)}, {clients}"
        if isinstance(message, Notice):
            return f"the server does not begin: {one_line('; '.join(message.why))}"
        return f"a {type(message).__name__.lower()}"

    def _beat(self) -> None:
        """Called while the worker works."""
        self._check_stop()
        try:
            if self._fleet is not None:
                self._fleet.beat()
        except (Unreachable, Turned, RunOver):
            pass  # it is met again when the answer is sent

    def _refuse(self, why: str) -> None:
        self.tell(f"an order is refused: {one_line(why)}")
        self._refused += 1
        if self._refused <= MOST_REFUSALS_LOGGED:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            try:
                disk.append(self.settings.state, "refused.log", f"{stamp} {one_line(why)}\n".encode())
            except OSError as error:
                self.tell(f"refused.log: {_cannot_write(error)}")

    def _last_node(self) -> int:
        path = self.settings.state / "node"
        try:
            return int(path.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return 0

    def _keep_node(self, node: int) -> None:
        try:
            with opening.folder(self.settings.state) as own:
                disk.put(own, "node", str(node).encode("ascii"))
        except OSError as error:  # after a kill, the SuperLink then believes in this process for a minute more
            self.tell(f"node: {_cannot_write(error)}")

    def _disconnect(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    def _leave(self) -> None:
        if self._fleet is not None:
            with suppress(Unreachable, Turned, RunOver):
                self._fleet.deactivate()
            self._fleet.close()

    def _words(self, error: Exception) -> str:
        address = self.settings.site.server
        if isinstance(error, Unreachable):
            return f"{address} is out of reach: {one_line(str(error))}; trying again"
        hint = "the server may not have enrolled this key yet, or this machine's clock may be wrong"
        if isinstance(error, OtherServer):
            hint = "it is not the server of this kit, or this machine's clock is wrong, or the certificate has ended"
        return f"{address} does not let this site in: {one_line(str(error))}; {hint}; trying again"

    def _say(self, text: str) -> None:
        """Says something once, however often it happens in a row."""
        if text != self._said:
            self._said = text
            self.tell(text)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._check_stop()
            time.sleep(min(left, 0.2))

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Stopped


def _cannot_write(error: OSError) -> str:
    return f"the site cannot write to its disk: {opening.reason(error)}"
