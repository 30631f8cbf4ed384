"""Before enrolment, where sites have their own files: the server asks each what all must know, and puts the answers
together into one preparation. Nothing of a single example reaches it."""

from collections.abc import Collection, Iterator, Mapping

from protofed.api.task import ClientId
from protofed.errors import BadInput
from protofed.federation.enrolling import Central, asked, other_clients, refused
from protofed.federation.interface import Link
from protofed.federation.messages import Refusal, Shared, Survey
from protofed.federation.own_formats import preparation_text, read_shares
from protofed.runs.config.recording import task_table
from protofed.runs.config.toml import section_text
from protofed.tasks.custom import Custom
from protofed.tasks.custom.shares import Share, agreed


def surveyed(
    link: Link, settings: Custom, seconds: float, speakers: Mapping[str, Collection[ClientId]] | None = None
) -> Central:
    """What the server knows of the task once all sites have agreed. Raises BadInput with all refusals, by site."""
    task = section_text("task", task_table(settings))
    problems, owner = list[str](), dict[ClientId, str]()
    told: dict[str, dict[ClientId, Share]] = {}
    for site, answer in asked(link, lambda nonce: Survey(nonce, task), Shared, seconds).items():
        problems += refused(site, answer.refusals)
        if answer.refusals:
            continue
        try:
            told[site] = read_shares(answer.shares, settings.kind, site)
        except BadInput as error:
            problems.append(str(error))
            continue
        problems += other_clients(site, told[site], owner, speakers)
    if not problems:
        problems += _strange_classes(told)
    if problems:  # guard: surveys-refuse-before-enrolment
        raise BadInput("\n".join(problems))
    everyone = {client: share for shares in told.values() for client, share in shares.items()}
    try:
        found = agreed(everyone, settings)
        preparation = preparation_text(found)
    except BadInput as error:
        raise BadInput(f"sites do not fit together:\n{error}{_where(owner)}") from error
    return Central({}, model=settings.network(found), preparation=preparation)


def _strange_classes(told: Mapping[str, Mapping[ClientId, Share]]) -> Iterator[str]:
    """Sites whose classes are none of any other site: they mean other things, or spell them in another way."""
    classes = {site: {name for share in shares.values() for name in share.classes} for site, shares in told.items()}
    for site, own in classes.items():
        others = set[str]().union(*(names for other, names in classes.items() if other != site))
        if own and others and not own & others:  # guard: sites-have-a-class-in-common
            here, there = (", ".join(sorted(names)[:10]) for names in (own, others))
            yield f"{site}: {Refusal.OTHER_TASK}: its classes ({here}) are none of another site ({there})"


def _where(owner: Mapping[ClientId, str]) -> str:
    """Which sites the clients are at, where names do not say it."""
    others = [f"{client} is at site {site}" for client, site in sorted(owner.items()) if client != site]
    return f"\n({', '.join(others[:50])})" if others else ""
