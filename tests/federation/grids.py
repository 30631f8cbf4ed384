"""Small federations of sites in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from protofed.api.method import Method
from protofed.api.task import Task
from protofed.engine.federation import Federation
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.state import State
from protofed.federation.enrolling import Central, agree, described, enrolled, server_task
from protofed.federation.in_process import InProcess
from protofed.federation.interface import Link
from protofed.federation.keyring import Keyring
from protofed.federation.keys import PrivateKey
from protofed.federation.messages import Limits
from protofed.federation.runtime import Remote
from protofed.federation.server import at_server, terms_at_server
from protofed.federation.site import Site
from protofed.federation.site_data import SiteData, own_part
from protofed.federation.site_store import StateFiles
from protofed.federation.told_privacy import ToldPrivate
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.config import Config
from protofed.runs.config.recording import task_table
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runtimes.client_store import Receipt
from protofed.testing.federations import TASK, TRAINING
from protofed.transforms.chain import UploadSettings
from protofed.tree import Tree

CLIENTS = {"north": ("ann", "bob"), "south": ("cyd", "dan"), "west": ("eve",)}
"""Of each site, for the task of five clients."""
RUN = "run-1"
FEDERATION = "0" * 32
NO_LIMITS = Limits()
NO_SUMS = SecureSettings()
NO_PRIVACY = PrivacySettings()
AS_THEY_ARE = UploadSettings()
USUAL = EvaluationSettings()


@cache
def key_of(site: str) -> PrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def keyring_of(folder: Path, site: str) -> Keyring:
    return Keyring(FEDERATION, site, key_of(site), folder / site)


def sites_of(
    folder: Path, task: Task = TASK, clients: Mapping[str, Sequence[str]] = CLIENTS, limits: Limits = NO_LIMITS
) -> dict[str, Site]:
    return {
        name: Site(
            folder / name, SiteData(own_part(task, own), task_table(task)), limits, keyring=keyring_of(folder, name)
        )
        for name, own in clients.items()
    }


def config_of(
    method: Method[Any, Any, Any, Any],
    task: Task = TASK,
    uploads: UploadSettings = AS_THEY_ARE,
    evaluation: EvaluationSettings = USUAL,
    secure: SecureSettings = NO_SUMS,
    privacy: PrivacySettings = NO_PRIVACY,
    **training: Any,
) -> Config:
    settings = replace(TRAINING, deadline=60.0, on_divergence="skip", **training)
    return Config(
        task,
        method,
        settings,
        RuntimeSettings(name="sequential"),
        evaluation,
        uploads=uploads,
        secure=secure,
        privacy=privacy,
    )


def remote(
    link: Link, config: Config, resend_after: float = inf, on_memory_lost: Any = "leave out", run: str = RUN
) -> Federation:
    """A federation over a link whose sites have all agreed."""
    task = config.task
    assert isinstance(task, Task)
    central = Central(task.tests, task.public, task.model)
    sites = enrolled(link, 5.0)
    blank = server_task(sites, central)
    description = described(config, run, sites, central, on_memory_lost)
    agree(link, description, sites, 5.0)
    runtime = Remote(link, description, sites.site_of, config.training.deadline, resend_after)
    pipeline, fine_tune = at_server(config.uploads.pipeline()), config.evaluation.fine_tune
    return Federation(
        config.method,
        blank,
        config.training,
        runtime,
        uploads=pipeline,
        secure=config.secure.made(terms_at_server(config, description)),
        private=ToldPrivate(config.privacy) if config.privacy.is_on else None,
        fine_tune=fine_tune,
        name=run,
    )


def here(method: Method[Any, Any, Any, Any], **training: Any) -> Federation:
    """The same federation in one process."""
    config = config_of(method, **training)
    assert isinstance(config.task, Task)
    return Federation(config.method, config.task, config.training)


def states(sites: Mapping[str, Site], state: State, federation: Federation) -> dict[str, Tree]:
    """What the clients keep, read from their sites' disks."""
    found = {}
    for site in sites.values():
        store = site._runs[federation.name].runtime.store
        assert isinstance(store, StateFiles)
        for client in site.data.clients:
            if client in state.receipts:
                found[client] = store.load(client, Receipt(state.receipts[client]))
    return dict(sorted(found.items()))


def grid(folder: Path, method: Method[Any, Any, Any, Any], **training: Any) -> tuple[Federation, dict[str, Site]]:
    sites = sites_of(folder)
    return remote(InProcess(sites), config_of(method, **training)), sites
