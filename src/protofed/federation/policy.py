"""A site's own file, `site.toml`: who it is, what data it has, and what it lets a server ask for.

The file lies on the site's disk. No message can change it, and what it forbids stays forbidden whatever is ordered.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le

from protofed.errors import BadInput
from protofed.federation import keys
from protofed.federation.addresses import host_and_port
from protofed.federation.keyring import Keyring
from protofed.federation.messages import Limits
from protofed.federation.own_data import OwnData, Telling
from protofed.federation.site_data import SiteData, package_data
from protofed.methods import METHODS
from protofed.runs.config.messages import listed
from protofed.runs.config.schema import Problem, Problems, UnknownKey, field_names, filled, named, nearest
from protofed.runs.config.toml import document
from protofed.tasks import TASKS, TaskSettings
from protofed.tasks.custom import Custom

T = TypeVar("T")

FILE = "site.toml"
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
FEDERATION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Identity:
    """Who the site is, and where its server is. The kit has this filled in."""

    name: str
    federation: str
    """The number of the federation, which is signed with every message."""
    server: str
    """HOST:PORT of the server."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where clients are trained."""


@dataclass(frozen=True)
class DataSettings:
    """What data the site has."""

    clients: list[str] = field(default_factory=list)
    """Those of the task's clients that are this site's. None: all."""


@dataclass(frozen=True)
class Policy:
    """What the site lets a server ask for. It wins over everything that a server says."""

    methods: list[str] = field(default_factory=list)
    """Methods that may be trained here, such as `fedavg`. None are named: all that protofed has."""
    networks: list[str] = field(default_factory=list)
    """Networks that may be trained here, such as `small_cnn`. None are named: all."""
    steps: list[str] = field(default_factory=list)
    """Steps of a method that may be done here, such as `train`. None are named: all."""
    most_epochs: Annotated[int, Ge(1)] = 100
    """Epochs of one client in one round."""
    most_rounds: Annotated[int, Ge(1)] = 1000
    """Rounds of one run."""
    most_bytes: Annotated[int, Ge(1000), Le(2**31)] = 2**30
    """Bytes of one message, either way."""
    most_hours: Annotated[float, Gt(0)] = 24.0
    """Hours that this site works for one run."""
    order_minutes: Annotated[float, Gt(0)] = 60.0
    """Minutes that this site works at one order. Then the process at work is ended, whatever it is at."""
    min_class_count: Annotated[int, Ge(1)] = 5
    """Nothing is said of a class of which a client has fewer examples: no prototype, no count, and of own files not
    even its name. A prototype of few examples says much about them."""
    min_rows: Annotated[int, Ge(1)] = 5
    """Of own tables: no word and no sum of fewer training rows is told. The task's `min_rows` must be as many."""
    columns: list[str] = field(default_factory=list)
    """Of own tables: the columns that may be learnt from. None are named: all but those in the task's `leave_out`."""
    tell_classes: bool = True
    """Of own files: whether the names of classes are told. If not, other sites must have all classes of this one."""
    require_secure_sums: bool = False
    """Whether this site takes part in secure sums alone, so that a server is given no upload of one client."""
    believed_keys: list[str] = field(default_factory=list)
    """For secure sums: the fingerprints of the other sites' keys, as they say them by telephone. None are named: each
    key is believed that the server gives out first."""
    require_privacy: bool = False
    """Whether this site takes part in runs with differential privacy alone (`privacy.level`)."""
    max_epsilon: Annotated[float, Ge(0), Le(1000)] = 0.0
    """The largest ε of each of this site's clients, over all runs of this federation together; what they cost adds up.
    Then every run must be private. 0: there is none, and each run promises what it says."""
    max_epsilon_delta: Annotated[float, Gt(0), Le(0.01)] = 1e-5
    """The δ at which `max_epsilon` is meant."""
    dry_run: bool = False
    """Everything is checked and written into the log, and nothing is done."""

    def telling(self) -> Telling:
        return Telling(self.tell_classes, self.min_class_count, tuple(self.columns), self.min_rows)

    def limits(self) -> Limits:
        return Limits(
            tuple(self.methods),
            tuple(self.networks),
            tuple(self.steps),
            self.most_epochs,
            self.most_rounds,
            self.most_bytes,
            self.most_hours,
            self.min_class_count,
            self.require_secure_sums,
            self.require_privacy,
            self.max_epsilon,
            self.max_epsilon_delta,
        )


@dataclass(frozen=True)
class SiteSettings:
    folder: Path
    """Where the file lies, with the key and all that the site keeps."""
    site: Identity
    task: TaskSettings
    clients: tuple[str, ...]
    policy: Policy

    @property
    def key(self) -> Path:
        return self.folder / "site.key"

    def private_key(self) -> keys.PrivateKey:
        if not self.key.exists():
            raise BadInput(f"{self.key}: there is no such file: `protofed site key {self.folder}` makes it")
        return keys.read_private_key(self.key)

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.pub"

    @property
    def state(self) -> Path:
        """What the site keeps: the states of its clients, its log, its node."""
        return self.folder / "state"

    def keyring(self, private: keys.PrivateKey) -> Keyring:
        """What the site needs for secure sums."""
        believed = tuple(self.policy.believed_keys)
        return Keyring(self.site.federation, self.site.name, private, self.state, believed)

    def data(self) -> SiteData | OwnData:
        """The site's examples, or the files that become examples once all sites have agreed."""
        if isinstance(self.task, Custom):
            return OwnData(self.task, self.clients, self.policy.telling())
        if self.clients:
            return package_data(self.task, self.clients)
        return package_data(self.task, self.task.build().clients)


def read(folder: Path) -> SiteSettings:
    """The settings in a site's folder. Raises one BadInput with all that is wrong."""
    path = folder / FILE
    table, place = document(path)
    sections: dict[str, Any] = {"site": Identity, "data": DataSettings, "policy": Policy}
    problems: list[Problem] = [
        UnknownKey((k,), "unknown section", known=(*sections,)) for k in table if k not in sections
    ]
    values: dict[str, Any] = {}
    task: TaskSettings | None = None
    for name, cls in sections.items():
        own = table.get(name, {})
        if not isinstance(own, dict):
            problems.append(Problem((name,), "must be a section"))
            continue
        if name == "data":
            own = dict(own)
            task = _task(own.pop("task", None), problems)
        values[name] = _filled(cls, own, name, problems)
    if isinstance(identity := values.get("site"), Identity):
        problems += _checked_identity(identity)
    if isinstance(policy := values.get("policy"), Policy):
        known = {name: nearest(name, METHODS) for name in policy.methods if name not in METHODS}
        problems += [Problem(("policy", "methods"), f"{name!r} is unknown{hint}") for name, hint in known.items()]
    if isinstance(task, Custom) and not Path(task.path).is_absolute():  # guard: site-s-folder-is-a-full-path
        what = "must be the full path of the folder with this site's files, such as /srv/scans"
        problems.append(Problem(("data", "task", "path"), f"{what}: a site may be started from anywhere"))
    if problems or task is None:
        settable = {name: field_names(cls) for name, cls in sections.items()}
        raise BadInput(listed(problems, settable, place))  # guard: site-file-strict
    return SiteSettings(folder, values["site"], task, tuple(values["data"].clients), values["policy"])


def _filled(cls: type[T], table: Mapping[str, Any], where: str, problems: list[Problem]) -> T | None:
    try:
        return filled(cls, table, where)
    except Problems as error:
        problems += error.all
        return None


def _task(table: Any, problems: list[Problem]) -> TaskSettings | None:
    if not isinstance(table, dict):
        problems.append(Problem(("data", "task"), "is missing: a section with the name and the settings of the task"))
        return None
    try:
        return named(TASKS, table, "data.task")
    except Problems as error:
        problems += error.all
        return None


def _checked_identity(identity: Identity) -> list[Problem]:
    found = []
    if not SITE_NAME.fullmatch(identity.name):
        found.append(Problem(("site", "name"), "must be of letters, digits, - and _"))
    if not FEDERATION.fullmatch(identity.federation):
        found.append(Problem(("site", "federation"), "must be the 32 letters of the kit"))
    try:
        host_and_port(identity.server)
    except BadInput as error:
        found.append(Problem(("site", "server"), str(error)))
    return found
