"""A run whose clients are at sites, ready to be done by `protofed.runs.runner.execute`."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from protofed.api.task import ClientId, Task
from protofed.engine.federation import Federation
from protofed.errors import BadInput
from protofed.federation.enrolling import Central, Enrolled, agree, described, enrolled, server_task
from protofed.federation.interface import Link
from protofed.federation.messages import Description, OnMemoryLost
from protofed.federation.notices import sites_told
from protofed.federation.runtime import Remote
from protofed.federation.surveying import surveyed
from protofed.federation.told_privacy import ToldPrivate
from protofed.runs.config.checks import check_sections, check_task
from protofed.runs.config.config import Config
from protofed.runs.config.messages import refuse
from protofed.runs.config.recording import text_digest
from protofed.runs.config.schema import Problem
from protofed.runs.runner import Experiment
from protofed.tasks import ReadsOwnFiles
from protofed.tasks.custom import Custom
from protofed.transforms.chain import UploadPipeline

if TYPE_CHECKING:
    from protofed.privacy.exchanges import Terms


@sites_told
def prepared(
    link: Link,
    config: Config,
    run: str,
    *,
    seconds: float = 60.0,
    resend_after: float = inf,
    on_memory_lost: OnMemoryLost = "leave out",
    central: Central | None = None,
    speakers: Mapping[str, Collection[ClientId]] | None = None,
) -> Experiment:
    """Has all sites of a link take part in an experiment. Raises BadInput with every refusal, by site.

    `run` names the run for as long as it goes on: sites keep what clients remember below it, so a run that is resumed
    needs the name that it had. `seconds` is how long sites may take to say that they take part. After `resend_after`
    seconds without an answer an order is sent again. `central` is what the server has of the task; without it, the task
    is built for its test sets and public examples. `speakers` has, for some sites, the only clients that they may speak
    for.
    """
    refuse([*check_sections(vars(config), data_elsewhere=True), *check_remote(config)])
    if central is None:
        central = _known(link, config, seconds, speakers)
    sites = enrolled(link, seconds, speakers, central.preparation)
    task = server_task(sites, central)
    refuse([*check_task(config.evaluation, task)])
    description = described(config, run, sites, central, on_memory_lost)
    training = config.training
    most_bytes = {site: own.limits.bytes for site, own in sites.enrolments.items()}
    runtime = Remote(link, description, sites.site_of, training.deadline, resend_after, most_bytes)
    federation = Federation(
        config.method,
        task,
        training,
        runtime,
        uploads=at_server(config.pipeline),
        secure=config.secure.made(terms_at_server(config, description)),
        private=ToldPrivate(config.privacy) if config.privacy.is_on else None,
        fine_tune=config.evaluation.fine_tune,
        name=run,
    )
    agree(link, description, sites, seconds)
    return Experiment(
        federation,
        evaluate_every=config.evaluation.every,
        evaluate_clients_every=config.evaluation.clients,
        patience=config.evaluation.patience,
        threads=config.runtime.threads,
        config=config.toml(),
        identity=_identity(config, sites, central),  # guard: resumed-with-the-same-clients
        runtime={"name": "remote", **config.runtime.numerics()},
        on_save_error=config.saving.on_error,
        keep=tuple(config.saving.keep),
        logging=config.logging,
    )


def _known(link: Link, config: Config, seconds: float, speakers: Mapping[str, Collection[ClientId]] | None) -> Central:
    """What the server knows of the task: all that sites tell where the data are their own."""
    if isinstance(config.task, Custom):
        return surveyed(link, config.task, seconds, speakers)
    return Central.of(config.task if isinstance(config.task, Task) else config.task.build())


def _identity(config: Config, sites: Enrolled, central: Central) -> str:
    """The hash of what changes numbers, with who takes part, and what was agreed on own files."""
    settings, _, files = config.identity.partition("+")
    prepared = text_digest(central.preparation) if central.preparation else ""
    return f"{settings}+{files}{sites.digest}{prepared}"


def terms_at_server(config: Config, description: Description) -> "Terms | None":
    """What the server knows of secure sums over sites: nothing secret. Raises BadInput."""
    if not config.secure.sums:
        return None
    from protofed.federation.keyring import identities_of
    from protofed.privacy.exchanges import Terms
    from protofed.privacy.site import LEAST_SITES

    if (count := len(description.keys)) < LEAST_SITES:
        raise BadInput(f"secure.sums: {count} sites take part, and it takes {LEAST_SITES}")
    identities, party_of = identities_of(description.keys)
    return Terms(None, identities, config.secure.threshold, party_of=party_of)


def at_server(pipeline: UploadPipeline) -> UploadPipeline:
    """What the server does with uploads. Sites withhold rare classes; it knows no labels that it could compare with."""
    return replace(pipeline, min_class_count=0)  # guard: server-without-labels-compares-none


def check_remote(config: Config) -> Iterator[Problem]:
    """Settings that a run whose clients are elsewhere cannot have."""
    training = config.training
    if not training.deadline:  # guard: remote-runs-have-a-deadline
        what = "is 0, so a site that is gone would be waited for without end: give the seconds that a round may take"
        yield Problem(("training", "deadline"), what)
    if training.on_divergence == "stop":  # guard: remote-runs-go-on
        what = 'is "stop", so any one site could end the run: take "skip" or "retry_half_lr"'
        yield Problem(("training", "on_divergence"), what)
    if isinstance(config.task, Custom):
        yield from _check_own_files(config.task)
    elif isinstance(config.task, ReadsOwnFiles):  # guard: remote-runs-without-own-tasks
        what = "is a task of your own code, which sites cannot agree on: take custom, or another of protofed's"
        yield Problem(("task", "name"), what)
    if config.secure.sums and not config.secure.masks:  # guard: remote-sums-have-masks
        what = "is false, which is for simulations: sites add under masks alone. Leave it out"
        yield Problem(("secure", "masks"), what)
    if config.privacy.is_on and config.privacy.noise != "secret":  # guard: noise-of-sites-is-secret
        what = 'is "simulated", which protects nobody, and sites draw secret noise alone: set it to "secret"'
        yield Problem(("privacy", "noise"), what)
    if config.evaluation.global_models:
        what = "reads what clients keep, which stays at their sites: leave it out"
        yield Problem(("evaluation", "global_models"), what)
    if config.runtime.threads != 1:
        yield Problem(("runtime", "threads"), "is not 1, and sites work on one thread, so that they agree to the bit")


def _check_own_files(task: Custom) -> Iterator[Problem]:
    if task.path:  # guard: own-files-are-at-sites
        yield Problem(("task", "path"), "is a folder of this machine, and the data are at the sites: leave it out")
    if ":" in (task.model or ""):  # guard: own-files-with-networks-of-ours
        yield Problem(
            ("task", "model"), "is a network of your own code, which sites do not have: take one of protofed's"
        )
