"""Before the first round: the server asks who is there, makes a task of what sites declare, and has every site agree.
The task holds no example of any site."""

import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

import torch

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.engine.message import printable
from protofed.errors import BadInput
from protofed.federation.agreement import other_versions
from protofed.federation.codec import Undecodable, decoded, encoded
from protofed.federation.interface import Link
from protofed.federation.messages import (
    Description,
    Enrolment,
    Message,
    OnMemoryLost,
    Proposal,
    Question,
    Refusal,
    RosterEntry,
    Shared,
    SiteKeys,
    Verdict,
)
from protofed.federation.own_formats import read_preparation
from protofed.federation.plan import config_text, digest_of_methods, method_digests, plan_of, versions
from protofed.federation.site_data import blank_examples, own_rows
from protofed.models.formats import DTYPES, Client, NetworkByName, Outline, outline_of, preprocessing_of, read
from protofed.nn.networks import Parts
from protofed.runs.config.config import Config
from protofed.runs.config.recording import text_digest
from protofed.tasks.models import Network, NetworkOfClient

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Of an enrolment or a verdict."""
ALIKE = ("name", "classes", "inputs", "tests", "public")
"""What the outlines of all sites must have alike."""
MOST_EXAMPLES = 10_000_000
"""Of one client: for each the server keeps a number in memory for a moment."""
MOST_WEIGHTS = 2_000_000_000
"""Of a network that a site names."""

M = TypeVar("M", Shared, Enrolment, Verdict)


@dataclass(frozen=True)
class Enrolled:
    """What sites have declared, by site."""

    enrolments: Mapping[str, Enrolment]
    outlines: Mapping[str, Outline]

    @property
    def site_of(self) -> dict[ClientId, str]:
        return {client: site for site, outline in self.outlines.items() for client in outline.clients}

    @property
    def keys(self) -> tuple[SiteKeys, ...]:
        """For secure sums. Raises BadInput with the sites that have given none."""
        found = {site: own.keys for site, own in self.enrolments.items()}
        problems = [
            f"{site}: {Refusal.OTHER_KEYS}: it gives {'no keys' if own is None else 'the keys of another site'}"
            for site, own in found.items()
            if own is None or own.site != site  # guard: sites-give-own-keys
        ]
        if problems:
            raise BadInput("\n".join(problems))
        return tuple(own for own in found.values() if own is not None)

    @property
    def digest(self) -> str:
        """Of who takes part, and with how many examples."""
        facts = {client: [facts.examples, facts.domain, facts.is_held_out] for client, facts in self.clients.items()}
        return text_digest(json.dumps(facts))

    @property
    def clients(self) -> dict[ClientId, Client]:
        """Of all sites, in canonical order."""
        return dict(
            sorted(((c, f) for one in self.outlines.values() for c, f in one.clients.items()), key=itemgetter(0))
        )


@dataclass(frozen=True)
class Central:
    """What the server has of a task itself."""

    tests: Mapping[str, Data] = field(default_factory=dict)
    """The test set of each domain."""
    public: Data | None = None
    model: Callable[[ClientId], Parts] | None = None
    """Builds clients' networks. Without it they are built by the names that sites give."""
    outline: Outline | None = None
    """What sites must say of their tasks too, but for their clients."""
    preparation: str = ""
    """How sites' own files are prepared, as all have agreed; empty if the task is one of protofed's."""

    @classmethod
    def of(cls, task: Task) -> "Central":
        """What the server keeps of a task that it can build; clients' examples are left behind."""
        tests = {domain: own_rows(data) for domain, data in task.tests.items()}
        return cls(tests, task.public and own_rows(task.public), task.model, outline_of(task))


def enrolled(
    link: Link, seconds: float, speakers: Mapping[str, Collection[ClientId]] | None = None, preparation: str = ""
) -> Enrolled:
    """Asks every site of a link what it enrols. Raises BadInput with all that is wrong, by site. `speakers` has, for
    some sites, the only clients that they may speak for. `preparation` is what sites with own files agreed on."""
    answers = asked(link, lambda nonce: Question(nonce, preparation), Enrolment, seconds)
    problems, outlines, owner = list[str](), dict[str, Outline](), dict[ClientId, str]()
    for site, enrolment in answers.items():
        problems += [f"{site}: {name}: {text}" for name, text in other_versions(versions(), enrolment.versions)]
        problems += refused(site, enrolment.refusals)
        if enrolment.refusals:
            continue
        try:
            outlines[site] = outline = read(Outline, enrolment.outline.encode(), f"what {site} enrols")
        except BadInput as error:
            problems.append(f"{site}: {printable(str(error))}")
            continue
        problems += other_clients(site, outline.clients, owner, speakers)
        for client, facts in outline.clients.items():
            if facts.examples > MOST_EXAMPLES:
                problems.append(f"{site}: {Refusal.OTHER_CLIENTS}: {printable(client)!r}, {facts.examples} examples")
    if problems:
        raise BadInput("\n".join(problems))
    return Enrolled(answers, outlines)


def other_clients(
    site: str,
    clients: Iterable[ClientId],
    owner: dict[ClientId, str],
    speakers: Mapping[str, Collection[ClientId]] | None,
) -> Iterator[str]:
    """What is wrong with the clients that a site speaks for. `owner` has those of other sites, and is given these."""
    for client in clients:
        if client in owner:  # guard: a-client-has-one-site
            yield f"{site}: {Refusal.OTHER_CLIENTS}: {client!r} is a client of {owner[client]} too"
        if speakers and client not in speakers.get(site, (client,)):  # guard: sites-speak-for-enrolled-clients
            yield f"{site}: {Refusal.OTHER_CLIENTS}: its key may not speak for {printable(client)!r}"
        if not client.isprintable() or len(client) > 200:
            yield f"{site}: {Refusal.OTHER_CLIENTS}: {printable(client)[:200]!r} cannot name a client"
        owner[client] = site


def refused(site: str, refusals: Iterable[tuple[str, str]]) -> list[str]:
    """The refusals of a site as sentences."""
    return [f"{site}: {printable(name)}: {printable(text)}" for name, text in refusals]


def server_task(sites: Enrolled, central: Central) -> Task:
    """The task as the server has it: clients with blank examples, as many as they enrolled. Raises BadInput if sites
    differ in their tasks."""
    one, outline = next(iter(sites.outlines.items()))
    first, where = (central.outline, "at the server") if central.outline else (outline, f"at {one}")
    problems = list[str]()
    for site, own in sites.outlines.items():
        differ = [what for what in ALIKE if getattr(own, what) != getattr(first, what)]
        if differ:  # guard: sites-have-one-task
            problems.append(f"{site}: {Refusal.OTHER_TASK}: {', '.join(differ)} not as {where}")
    if central.preparation:
        problems += _not_as_agreed(sites, central)
    if {name: len(data) for name, data in central.tests.items()} != dict(first.tests):
        problems.append(f"{Refusal.OTHER_TASK}: the server's test sets are not those that the sites have")
    if problems:
        raise BadInput("\n".join(problems))
    clients = _in_order(sites.clients, central)
    store = torch.zeros((1, *first.inputs.shape), dtype=DTYPES[first.inputs.stored_dtype])
    blank, enrolments = blank_examples(store, 1), sites.enrolments.values()
    domains = {client: facts.domain for client, facts in clients.items() if facts.domain in central.tests}
    numbers = tuple(map(str, range(len(first.classes))))
    return Task(
        name=first.name,
        clients={client: blank_examples(store, facts.examples) for client, facts in clients.items()},
        tests=central.tests,
        num_classes=len(first.classes),
        model=central.model or _networks({client: facts.network for client, facts in clients.items()}),
        domain_of={client: domain for client, domain in domains.items() if domain is not None},
        local_tests={client: blank for own in enrolments for client in own.own_tests if client in clients},
        validation={client: blank for own in enrolments for client in own.validated if client in clients},
        transform=Transform(first.inputs.mean, first.inputs.std),
        public=central.public,
        held_out=tuple(client for client, facts in clients.items() if facts.is_held_out),
        class_names=() if first.classes == numbers else first.classes,
        preprocessing=preprocessing_of(first.inputs.files),
        has_data=False,
    )


def _in_order(clients: Mapping[ClientId, Client], central: Central) -> dict[ClientId, Client]:
    """In the order of the server's own task, if it has one: reports list them as those of a run in one process do."""
    known = [client for client in (central.outline.clients if central.outline else ()) if client in clients]
    return {client: clients[client] for client in dict.fromkeys([*known, *clients])}


def _not_as_agreed(sites: Enrolled, central: Central) -> Iterator[str]:
    """What sites with own files enrol that is not what they agreed on."""
    found = read_preparation(central.preparation)
    assert isinstance(central.model, Network), "the server knows the network of own files"
    model = NetworkByName(name=central.model.name, settings=dict(central.model.settings))
    for site, outline in sites.outlines.items():
        is_as_agreed = (
            outline.classes == found.classes
            and preprocessing_of(outline.inputs.files) == found.files
            and all(facts.network == model for facts in outline.clients.values())
        )
        if not is_as_agreed:  # guard: own-files-prepared-as-agreed
            yield f"{site}: {Refusal.OTHER_TASK}: classes, columns or network are not those that were agreed"


def _networks(written: Mapping[ClientId, NetworkByName | None]) -> Network | NetworkOfClient:
    """Only those of protofed: nothing that a site names is imported."""
    networks = {}
    for client, one in written.items():
        if one is None or one.is_own:  # guard: only-networks-of-ours
            raise BadInput(f"the network of client {client} is none of protofed's, so the server cannot build it")
        networks[client] = Network(one.name, one.settings)
        if (size := _num_weights(networks[client])) > MOST_WEIGHTS:  # guard: networks-of-sites-bounded
            raise BadInput(f"the network of client {client} has {size} weights; at most {MOST_WEIGHTS} are built")
    first, *others = networks.values()
    return NetworkOfClient(networks) if any(one != first for one in others) else first


def _num_weights(network: Network) -> int:
    """Without memory for any of them."""
    try:
        with torch.device("meta"):
            return sum(leaf.numel() for part in network().values() for leaf in part.parameters())
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"the network {network.name} cannot be built with the settings that a site gives") from error


def described(
    config: Config, run: str, sites: Enrolled, central: Central, on_memory_lost: OnMemoryLost = "leave out"
) -> Description:
    """The experiment as every site is told of it."""
    text = config_text(config)
    roster = tuple(RosterEntry(c, facts.domain, facts.is_held_out) for c, facts in sites.clients.items())
    digest = digest_of_methods(plan_of(text).methods)
    keys = sites.keys if config.secure.sums else ()
    tests = tuple(central.tests)
    return Description(run, text, versions(), digest, roster, tests, on_memory_lost, central.preparation, keys)


def agree(link: Link, description: Description, sites: Enrolled, seconds: float) -> None:
    """Has every site take part. Raises BadInput with all refusals, by site."""
    names = plan_of(description.config).methods
    problems = [
        f"{site}: {Refusal.OTHER_CODE}: its code of {name} is not the server's, or it does not take part in {name}"
        for site, own in sites.enrolments.items()
        for name in names
        if own.methods.get(name) != method_digests()[name]  # guard: server-compares-code
    ]
    verdicts = asked(link, lambda nonce: Proposal(nonce, description), Verdict, seconds)
    for site, verdict in verdicts.items():
        problems += refused(site, verdict.refusals)
        if verdict.digest != description.digest:  # guard: verdict-is-of-this-experiment
            problems.append(f"{site}: {Refusal.BAD_EXPERIMENT}: it judged another experiment")
    if problems:  # guard: refusals-before-first-round
        raise BadInput("\n".join(problems))


def asked(link: Link, ask: Callable[[str], Message], kind: type[M], seconds: float) -> dict[str, M]:
    """What every site answers. Raises BadInput with the names of those that do not."""
    nonces = {secrets.token_hex(16): site for site in link.sites()}
    if not nonces:
        raise BadInput("no site is enrolled")
    sent = {site: link.send(site, encoded(ask(nonce)), MOST_BYTES) for nonce, site in nonces.items()}
    found: dict[str, M] = {}
    end, wait = time.monotonic() + seconds, seconds / 5
    while len(found) < len(sent) and (left := end - time.monotonic()) > 0:
        for site, data in link.receive(min(left, wait)):
            try:
                answer = decoded(data, MOST_BYTES)
            except Undecodable as error:
                log.warning("a message of site %s was thrown away: %s", site, error)
                continue
            if isinstance(answer, kind) and nonces.get(answer.nonce) == site:
                found[site] = answer
    if missing := [site for site in sent if site not in found]:
        raise BadInput(f"no answer of {', '.join(missing)} in {seconds:g} s: start the sites first")
    return {site: found[site] for site in sorted(found)}
