"""What a site checks before it takes part: its own limits, and that both ends mean the same."""

from collections.abc import Iterator, Sequence

from protofed.errors import BadInput
from protofed.federation.keyring import Keyring
from protofed.federation.messages import Description, Limits, Refusal, Versions
from protofed.federation.plan import Plan, digest_of_methods, plan_of, versions
from protofed.federation.site_data import SiteData
from protofed.federation.site_store import RUN
from protofed.runs.config.checks import check_sections
from protofed.runs.config.messages import without_place
from protofed.runs.config.toml import loaded, section_text

Refused = tuple[Refusal, str]
"""The name of a refusal, and a sentence."""


def refusals(description: Description, data: SiteData, limits: Limits, keyring: Keyring | None = None) -> list[Refused]:
    """Why a site does not take part; empty if it does."""
    if found := list(other_versions(description.versions, versions())):
        return found
    if not RUN.fullmatch(description.run):
        return [(Refusal.BAD_EXPERIMENT, "the name of the run is not one of letters, digits, - and _")]
    try:
        plan = plan_of(description.config)
    except BadInput as error:
        return [(Refusal.BAD_EXPERIMENT, str(error))]
    sections = {key: value for key, value in vars(plan).items() if key != "task"}
    contradictions = [(Refusal.BAD_EXPERIMENT, without_place(problem)) for problem in check_sections(sections)]
    found = [*contradictions, *_other_experiment(description, plan, data), *_beyond(plan, data, limits)]
    return [*found, *(_other_keys(description, data, keyring) if plan.secure.sums else ())]


def other_versions(theirs: Versions, ours: Versions) -> Iterator[Refused]:
    if theirs.protocol != ours.protocol:  # guard: both-ends-of-one-protocol
        yield Refusal.OTHER_PROTOCOL, f"the server speaks version {theirs.protocol}, and this site {ours.protocol}"
    for name, there, here in (("protofed", theirs.protofed, ours.protofed), ("torch", theirs.torch, ours.torch)):
        if there != here:  # guard: both-ends-of-one-version
            yield Refusal.OTHER_VERSION, f"the server has {name} {there[:40]}, and this site {here}"


def _other_experiment(description: Description, plan: Plan, data: SiteData) -> Iterator[Refused]:
    if description.method_digest != digest_of_methods(plan.methods):  # guard: both-ends-have-one-code
        yield Refusal.OTHER_CODE, f"the code of {' around '.join(plan.methods)} is not the one installed here"
    if plan.task != loaded(section_text("task", data.settings), "the site's task").get("task"):  # guard: agreed-task
        yield (
            Refusal.OTHER_TASK,
            f"the experiment is on {plan.task.get('name')!r}, with settings that are not this site's",
        )
    if description.tests != tuple(data.task.tests):
        there = ", ".join(description.tests) or "none"
        yield (
            Refusal.OTHER_TASK,
            f"the server tests on {there}, and this site on {', '.join(data.task.tests) or 'none'}",
        )
    names = [entry.id for entry in description.clients]
    if len(names) != len({*names}) or not {*data.clients} <= {*names}:
        yield Refusal.OTHER_CLIENTS, "the experiment does not name each client of this site once"


def _beyond(plan: Plan, data: SiteData, limits: Limits) -> Iterator[Refused]:
    """What the site does not let a server ask for."""
    training = plan.training
    if limits.secure_sums and not plan.secure.sums:  # guard: site-s-sums
        what = "is true in this site's policy, and secure.sums is false in the experiment"
        yield Refusal.SUMS_REQUIRED, f"require_secure_sums {what}: the server would see each client's upload"
    if plan.secure.sums and not plan.secure.masks:  # guard: sums-of-sites-masked
        what = "is false, so the server would see what each client adds, and this site adds under masks alone"
        yield Refusal.SUMS_REQUIRED, f"secure.masks {what}"
    yield from _beyond_privacy(plan, limits)
    epochs = max(training.epochs, plan.evaluation.fine_tune)
    for name in plan.methods:
        if limits.methods and name not in limits.methods:  # guard: site-s-methods
            yield Refusal.METHOD_NOT_ALLOWED, f"this site does not take part in {name}"
    for network in sorted(data.network_names()):
        if limits.networks and network not in limits.networks:  # guard: site-s-networks
            yield Refusal.NETWORK_NOT_ALLOWED, f"this site does not train the network {network}"
    if epochs > limits.epochs:  # guard: site-s-epochs
        yield Refusal.TOO_MANY_EPOCHS, f"{epochs} epochs, and this site trains at most {limits.epochs}"
    if training.rounds > limits.rounds:  # guard: site-s-rounds
        yield Refusal.TOO_MANY_ROUNDS, f"{training.rounds} rounds, and this site takes part in at most {limits.rounds}"


def _beyond_privacy(plan: Plan, limits: Limits) -> Iterator[Refused]:
    settings = plan.privacy
    asks = "require_privacy is true" if limits.privacy else f"max_epsilon is {limits.epsilon:g}"
    if (limits.privacy or limits.epsilon) and not settings.is_on:  # guard: site-s-privacy
        yield Refusal.PRIVACY_REQUIRED, f'{asks} in this site\'s policy, and privacy.level is "none" in the experiment'
    if settings.is_on and settings.noise != "secret":  # guard: site-s-noise-is-secret
        what = "is not secret, so whoever knows the run's seed can take the noise off"
        yield Refusal.PRIVACY_REQUIRED, f"privacy.noise {what}"


def _other_keys(description: Description, data: SiteData, keyring: Keyring | None) -> Iterator[Refused]:
    """Why a site does not add up with others."""
    if keyring is None:
        yield Refusal.OTHER_KEYS, "this site has no key, and secure.sums needs one"
        return
    yield from keyring.refusals(description.keys, [entry.id for entry in description.clients], data.clients)


def sentence(found: Sequence[Refused]) -> str:
    """The refusals as one text."""
    return "; ".join(f"{name}: {text}" for name, text in found)
