"""What passes between a server and its sites: plain values and tensors. No code travels, and no pickle.

    server                                     site
    Survey     what are your own files like?   Shared      names, counts and sums (only where data are sites' own)
    Question   who is there?                   Enrolment   its clients, versions and limits
    Proposal   the experiment                  Verdict     whether the site takes part, and why not
    Order      a step for clients of the site  Answer      an upload or a failure for each of them
    Notice     why the run does not begin      Notice      that it was heard: the same, empty

A message has a nonce, and what answers it has the same one. `codec.py` makes bytes of messages and messages of bytes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal

from protofed.api.task import ClientId
from protofed.runtimes.jobs import TestKind, Ticket

PROTOCOL = 3

OnMemoryLost = Literal["leave out", "start afresh"]
"""What happens when a site no longer has the state that a client should go on from: the client is left out, or it goes
on like one that has never taken part."""


class Refusal(StrEnum):
    """Why a site or the server refuses. The names are stable."""

    OTHER_PROTOCOL = "OTHER_PROTOCOL"
    OTHER_VERSION = "OTHER_VERSION"
    OTHER_CODE = "OTHER_CODE"
    OTHER_TASK = "OTHER_TASK"
    OTHER_DATA = "OTHER_DATA"
    OTHER_CLIENTS = "OTHER_CLIENTS"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    NETWORK_NOT_ALLOWED = "NETWORK_NOT_ALLOWED"
    STEP_NOT_ALLOWED = "STEP_NOT_ALLOWED"
    TOO_MANY_EPOCHS = "TOO_MANY_EPOCHS"
    TOO_MANY_ROUNDS = "TOO_MANY_ROUNDS"
    TOO_MANY_BYTES = "TOO_MANY_BYTES"
    TOO_MANY_HOURS = "TOO_MANY_HOURS"
    CLASS_NOT_TOLD = "CLASS_NOT_TOLD"
    COLUMN_NOT_ALLOWED = "COLUMN_NOT_ALLOWED"
    FEW_ROWS = "FEW_ROWS"
    FILES_NOT_USABLE = "FILES_NOT_USABLE"
    BAD_EXPERIMENT = "BAD_EXPERIMENT"
    NOT_AGREED = "NOT_AGREED"
    OTHER_SETTINGS = "OTHER_SETTINGS"
    FOREIGN_CLIENT = "FOREIGN_CLIENT"
    UNREADABLE = "UNREADABLE"
    NOT_FINITE = "NOT_FINITE"
    NONCE_USED = "NONCE_USED"
    DRY_RUN = "DRY_RUN"
    SUMS_REQUIRED = "SUMS_REQUIRED"
    SUMS_ONLY = "SUMS_ONLY"
    FEW_SITES = "FEW_SITES"
    OTHER_KEYS = "OTHER_KEYS"
    PRIVACY_REQUIRED = "PRIVACY_REQUIRED"
    EPSILON_TOO_LARGE = "EPSILON_TOO_LARGE"


@dataclass(frozen=True)
class Limits:
    """What a site lets a server ask for: the values of its policy. No names: all are allowed."""

    methods: tuple[str, ...] = ()
    """Names of METHODS."""
    networks: tuple[str, ...] = ()
    """Names of networks, such as `small_cnn`."""
    steps: tuple[str, ...] = ()
    """Steps of a method, such as `train` and `evaluate_own`."""
    epochs: int = 100
    """Of one client in one round."""
    rounds: int = 1000
    bytes: int = 2**30
    """Of one message, either way."""
    hours: float = 24.0
    """That the site works for one run, all its clients together."""
    class_count: int = 1
    """A client says nothing of a class of fewer examples."""
    secure_sums: bool = False
    """Whether it takes part in secure sums alone."""
    privacy: bool = False
    """Whether it takes part in runs with differential privacy alone."""
    epsilon: float = 0.0
    """The largest ε of each of its clients, over all runs together. 0: none."""
    delta: float = 1e-5
    """The δ of that."""


@dataclass(frozen=True)
class Versions:
    """What decides numbers on both ends."""

    protocol: int
    protofed: str
    torch: str


# ---- before the first round


@dataclass(frozen=True)
class Survey:
    """Asks a site what all sites must know of its own files, so that all prepare theirs alike."""

    nonce: str
    task: str
    """TOML: the section [task] of the experiment."""


@dataclass(frozen=True)
class Shared:
    """What a site tells of its own files: names, counts and sums, nothing of a single example."""

    nonce: str
    shares: str
    """JSON, by client: `protofed.tasks.custom.shares`. Empty if the site refuses."""
    refusals: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Question:
    """Asks a site what it enrols."""

    nonce: str
    preparation: str = ""
    """How own files are prepared, as all sites agreed: the JSON of `protofed.federation.own_formats.Preparation`. Empty
    if the task is one of protofed's."""


@dataclass(frozen=True)
class ClientKey:
    """What a client signs with in secure sums."""

    client: ClientId
    key: str
    """Of Ed25519, in hexadecimal."""
    signature: str
    """By the key of its site."""


@dataclass(frozen=True)
class SiteKeys:
    """The keys of a site, as the other sites are told of them."""

    site: str
    key: str
    """The public one that it was enrolled with, as PEM."""
    clients: tuple[ClientKey, ...]


@dataclass(frozen=True)
class Enrolment:
    """What a site declares."""

    nonce: str
    versions: Versions
    outline: str
    """Its task without an example, with its own clients: the JSON of `protofed.models.formats.Outline`."""
    own_tests: tuple[ClientId, ...]
    """Of its clients, those with a test set of their own, or one that is drawn for them."""
    validated: tuple[ClientId, ...]
    """Of its clients, those with validation examples."""
    methods: dict[str, str]
    """The methods that it takes part in, and the SHA-256 of the code of each."""
    limits: Limits
    refusals: tuple[tuple[str, str], ...] = ()
    """Why it enrols nothing; the outline is empty then."""
    keys: SiteKeys | None = None
    """For secure sums."""


@dataclass(frozen=True)
class RosterEntry:
    """What every site knows of every client."""

    id: ClientId
    domain: str | None
    is_held_out: bool = False


@dataclass(frozen=True)
class Description:
    """An experiment, as both ends know it."""

    run: str
    """Of letters, digits, `-` and `_`: the same for as long as the run goes on, whatever settings change."""
    config: str
    """TOML with all defaults resolved: the sections that `protofed.federation.plan.AGREED` names."""
    versions: Versions
    method_digest: str
    clients: tuple[RosterEntry, ...]
    """Of all sites."""
    tests: tuple[str, ...] = ()
    """The domains whose test sets are known at all sites and at the server, in their order."""
    on_memory_lost: OnMemoryLost = "leave out"
    preparation: str = ""
    """How own files are prepared, as in `Question`."""
    keys: tuple[SiteKeys, ...] = ()
    """Of all sites, for secure sums. Empty without them."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Proposal:
    """Asks a site to take part."""

    nonce: str
    description: Description


@dataclass(frozen=True)
class Verdict:
    """Whether a site takes part: it does if it refuses nothing."""

    nonce: str
    digest: str
    """Of the description."""
    refusals: tuple[tuple[str, str], ...] = ()
    """The name of each, one of `Refusal`, and a sentence."""


@dataclass(frozen=True)
class Notice:
    """Why the server does not begin. The site answers with an empty one."""

    nonce: str
    why: tuple[str, ...] = ()


# ---- in a round


@dataclass(frozen=True)
class Work:
    """What one client is asked to do in an order."""

    client: ClientId
    receipt: str
    """The SHA-256 of the state that it goes on from; empty for a client that has never taken part."""
    message: int
    """Which of the order's messages it is given."""
    epochs: int
    batch_size: int
    halvings: int
    step_seed: int
    """With the three before, what the site must come to by itself from the description: else the ends differ."""


@dataclass(frozen=True)
class Order:
    """A step for some clients of a site."""

    nonce: str
    digest: str
    """Of the description that was agreed."""
    ticket: Ticket
    step: str
    """A coroutine method of the installed method, by name; `base.` before it for a step of what the method goes
    around. Or an exchange of a secure sum, as `protofed.federation.steps` names them."""
    tests: TestKind
    evaluates: bool
    seconds: float
    """How long the answer is waited for."""
    works: tuple[Work, ...]
    messages: bytes = field(repr=False)
    """One safetensors file: a list of the messages. Equal ones are in it once."""


@dataclass(frozen=True)
class Done:
    """A client that did its step."""

    client: ClientId
    upload: bytes = field(repr=False)
    """A wire message (`protofed.engine.message`): the upload with the ticket, the new receipt and the loss."""
    is_afresh: bool = False
    """Whether its state was lost, and it began like one that has never taken part."""


@dataclass(frozen=True)
class Failed:
    client: ClientId
    reason: str
    """One of `CLAIMABLE`; a site can claim no other."""
    detail: str


@dataclass(frozen=True)
class Answer:
    nonce: str
    done: tuple[Done, ...]
    failed: tuple[Failed, ...]


Message = Survey | Shared | Question | Enrolment | Proposal | Verdict | Order | Answer | Notice
