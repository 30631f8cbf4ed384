"""A site's own files: what it tells of them, by its policy, and the task that they become once all sites agree."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from protofed.api.task import ClientId
from protofed.errors import BadInput
from protofed.federation.messages import Refusal
from protofed.federation.own_formats import (
    LEAVE_OUT,
    MOST_TOLD,
    preparation_text,
    read_preparation,
    read_shares,
    shares_text,
)
from protofed.federation.refused import Refused
from protofed.federation.site_data import SiteData
from protofed.runs.config.recording import task_table
from protofed.runs.config.toml import loaded, section_text
from protofed.tasks.custom import Custom
from protofed.tasks.custom.image_task import OwnImages
from protofed.tasks.custom.shares import Share, TableShare, agreed
from protofed.tasks.custom.table_task import OwnTables


@dataclass(frozen=True)
class Telling:
    """What a site tells of its own files."""

    classes: bool = True
    """Whether it tells the names of its classes. If not, other sites must have them all."""
    class_count: int = 1
    """It does not tell the name of a class of fewer examples."""
    columns: tuple[str, ...] = ()
    """Of tables, the columns that may be learnt from. None are named: all."""
    rows: int = 1
    """It tells no word and no sum of fewer training rows."""


TELLS_ALL = Telling()


class OwnData:
    """The files of a site's clients. They are read when the server asks, and kept in memory until it asks again."""

    def __init__(self, settings: Custom, clients: Sequence[ClientId] = (), telling: Telling = TELLS_ALL) -> None:
        """Raises BadInput if a client has no files."""
        self._settings, self._telling = settings, telling
        there = settings.site_names()
        if missing := sorted({*clients} - {*there}):
            found = ", ".join(there) or "nobody"
            raise BadInput(f"{settings.path}: no files of {', '.join(missing)}; there are those of {found}")
        self.clients = tuple(sorted(clients or there))
        if not self.clients:
            raise BadInput(f"{settings.path}: there are no files")
        self._files: OwnImages | OwnTables | None = None
        self._made: tuple[str, SiteData] | None = None
        """The preparation that was agreed last, and what it made of the files."""

    @property
    def table(self) -> dict[str, Any]:
        """The section [task] of the experiments that it is for. Where the files lie is the site's own business."""
        return {**task_table(self._settings), "path": ""}

    def shares(self, task: str) -> str:
        """What this site tells for an experiment, of the files as they are now. `task` is its section [task]. Raises
        Refused with what may be told, and BadInput with what may not."""
        self._refuse_other(loaded(task, "the task").get("task"))
        self._refuse_by_settings()
        own = self._read()
        if forbidden := self._forbidden(own):  # guard: only-allowed-columns-are-told
            what = f"{len(forbidden)} columns of its tables may not be learnt from: leave_out must name them"
            raise Refused(Refusal.COLUMN_NOT_ALLOWED, f"{what}. `protofed site check` there says which")
        text = shares_text({client: self._told(client, share, own) for client, share in own.shares.items()})
        read_shares(text, self._settings.kind, "this site")  # what others would refuse is not sent
        if (size := len(text.encode())) > MOST_TOLD:  # guard: shares-are-bounded
            what = f"its shares have {size} bytes, and at most {MOST_TOLD} are told: {LEAVE_OUT}"
            raise Refused(Refusal.TOO_MANY_BYTES, what)
        return text

    def prepared(self, preparation: str) -> SiteData:
        """The site's part of the task, prepared as agreed. Raises as `shares` does."""
        if not preparation:
            raise Refused(Refusal.NOT_AGREED, "this site has its own files, and the server has not asked about them")
        if self._made is None or self._made[0] != preparation:
            self._refuse_by_settings()
            own, found = self._files or self._read(), read_preparation(preparation)
            here = {label for examples in own.examples.values() for label in examples.labels}
            if not here <= {*found.classes}:  # guard: every-class-is-agreed
                what = "a class of this site was told by none: it is too rare everywhere, or may not be told"
                raise Refused(Refusal.CLASS_NOT_TOLD, what)
            task = self._settings.made(own, found)
            self._made = preparation, SiteData(replace(task, tests={}, domain_of={}), self.table)
        return self._made[1]

    def alone(self) -> SiteData | None:
        """Its task by what this site alone would agree on, to try it out; None if it has a single class, which needs
        other sites. Raises BadInput for all that the server would be refused."""
        try:
            self._refuse_by_settings()
            own = self._read()
            if forbidden := self._forbidden(own):
                raise BadInput(f"the policy does not allow the columns {', '.join(forbidden)}: name them in leave_out")
            if len({name for share in own.shares.values() for name in share.classes}) < 2:
                return None
            held_out = [client for client in self._settings.hold_out if client in self.clients]
            all_held_out = len(held_out) == len(self.clients)
            settings = replace(self._settings, hold_out=() if all_held_out else held_out)
            found = agreed(replace(own, settings=settings).shares, settings)
            return self.prepared(preparation_text(found))
        except Refused as refused:
            raise BadInput(str(refused)) from refused

    def _read(self) -> OwnImages | OwnTables:
        self._files = self._made = None
        own = self._settings.read(self.clients)
        if missing := sorted({*self.clients} - {*own.examples}):
            raise BadInput(f"{self._settings.path}: no files of {', '.join(missing)} can be read")
        if isinstance(own, OwnImages):
            own.tell_damaged()
        self._files = own
        return own

    # ---- by the policy

    def _told(self, client: ClientId, share: Share, own: OwnImages | OwnTables) -> Share:
        """Without the names of classes that the policy keeps back."""
        count = Counter(own.examples[client].labels)
        least = self._telling.class_count if self._telling.classes else inf
        # guard: rare-classes-are-not-told
        return replace(share, classes=tuple(name for name in share.classes if count[name] >= least))

    def _refuse_other(self, theirs: Any) -> None:
        ours = loaded(section_text("task", self.table), "the site's task")["task"]
        if ours == theirs:
            return
        names = {*ours} | {*theirs} if isinstance(theirs, dict) else {*ours}
        differ = sorted(name for name in names if not isinstance(theirs, dict) or ours.get(name) != theirs.get(name))
        what = f"settings of the task differ from this site's: {', '.join(differ)[:500]}"
        raise Refused(Refusal.OTHER_TASK, what)  # guard: shares-are-for-the-same-task

    def _refuse_by_settings(self) -> None:
        if ":" in (self._settings.model or ""):  # guard: own-data-with-networks-of-ours
            raise Refused(Refusal.NETWORK_NOT_ALLOWED, "the network is code of the user's own")
        least = self._telling.rows
        if self._settings.kind == "tables" and self._settings.min_rows < least:  # guard: site-s-fewest-rows
            what = f"tells of {self._settings.min_rows} rows, and this site of at least {least}"
            raise Refused(Refusal.FEW_ROWS, f"the task {what}: set min_rows = {least} in its section, at all ends")

    def _forbidden(self, own: OwnImages | OwnTables) -> list[str]:
        """The columns that are learnt from although the policy does not name them."""
        allowed = {*self._telling.columns}
        learnt = {name for share in own.shares.values() for name in _columns(share)} if allowed else set()
        return sorted(learnt - allowed)


def _columns(share: Share) -> Iterator[str]:
    if isinstance(share, TableShare):
        yield from share.columns
