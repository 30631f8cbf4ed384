"""One run of a sweep on another machine: what travels there, and what is done there.

Only text and bytes travel. The configuration is parsed on the other machine, by what is installed there, and must give
the run that was asked for.
"""

import contextlib
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypedDict

import protofed
from protofed.api.task import Task
from protofed.errors import BadInput
from protofed.runs.config import config as configuration
from protofed.runs.config.config import Config
from protofed.runs.config.user_classes import Importer, import_folders, loaded_from
from protofed.runs.run_process import one, reason
from protofed.runs.runtime_choice import Numerics
from protofed.runs.store.folder import VERSIONS, RunFolder
from protofed.runs.store.parcel import Parcel, checked, packed, unpack
from protofed.version import __version__


class Job(TypedDict):
    """A run, as it travels."""

    toml: str
    identity: str
    numerics: Numerics
    code: dict[str, bytes]
    """Files of the user's own classes, by their names below the folder that they are imported from."""
    folder: str
    """Where the command was started: relative paths of data start there, if the other machine has it."""
    command: list[str]
    files: Parcel
    """The run folder so far."""


def job(config: Config, files: Parcel) -> Job:
    """Refuses what would be another run once it is read from its text."""
    name = f"the run {config.identity} ({type(config.method).__name__})"
    if isinstance(config.task, Task):
        raise BadInput(f"{name} cannot travel to another machine: its task was built in Python, so give settings")
    code = _code(config)
    toml = config.toml()
    folders = import_folders(config.own_parts)
    with _importable(folders):
        try:
            there = configuration.parse(tomllib.loads(toml), "config.toml", importer=Importer(refusal=""))
        except BadInput as error:
            raise BadInput(f"{name} cannot travel to another machine: {error}") from error
    if there.identity != config.identity:
        raise BadInput(f"{name} cannot travel to another machine: a setting of it cannot be written as TOML")
    return Job(
        toml=toml,
        identity=config.identity,
        numerics=config.runtime.numerics(),
        code=code,
        folder=str(Path.cwd()),
        command=sys.argv,
        files=files,
    )


def versions() -> dict[str, str]:
    """What must be the same at both ends. A build such as +cpu may differ, and Python's version is left to Ray."""
    names = [name for name in VERSIONS if name not in ("protofed", "python")]
    return {"protofed": __version__, **{name: metadata.version(name).partition("+")[0] for name in names}}


def run_here(job: Job, should_stop: Callable[[int], bool]) -> tuple[str, Parcel]:
    """Why the run failed, empty if it did not, and its folder as far as it got. `should_stop` is told the rounds."""
    with tempfile.TemporaryDirectory(prefix="protofed-") as temporary:
        folder, failure = RunFolder(Path(temporary, "run")), ""
        try:
            with _beside(job, Path(temporary, "code")) as importer:
                config = configuration.parse(tomllib.loads(job["toml"]), "config.toml", importer=importer)
                _refuse_other_run(config, job)
                if job["files"]:
                    unpack(checked(job["files"], job["identity"]), folder)
                one(config, folder, lambda: should_stop(folder.rounds_saved))
        except Exception as error:
            failure = reason(error)
        try:
            return failure, packed(folder)
        except Exception as error:
            return failure or reason(error), {}


def _refuse_other_run(config: Config, job: Job) -> None:
    here, asked = config.runtime.numerics(), job["numerics"]
    changed = [f"{key} {asked.get(key)} there, {here[key]} here" for key in here if here[key] != asked.get(key)]
    if changed:
        what = "; ".join(changed)
        raise BadInput(f"this node would compute the run otherwise than where it was asked for ({what}): set [runtime]")
    if config.identity != job["identity"]:
        raise BadInput(
            f"this node has other data or code for the run {job['identity']}, which would be {config.identity} here: "
            "give all nodes the same files, with the same times of change"
        )


@contextlib.contextmanager
def _beside(job: Job, code: Path) -> Iterator[Importer]:
    """As if the command had been given here: the user's modules are at hand, and relative paths start where it was.
    The code comes from whoever gave the command, and whom this node runs tasks for."""
    for name, data in job["code"].items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_bytes(data)
    was, sys.argv = sys.argv, job["command"]
    is_here = Path(job["folder"]).is_dir()
    try:
        with _importable([str(code)]), contextlib.chdir(job["folder"]) if is_here else contextlib.nullcontext():
            yield Importer(refusal="")
    finally:
        sys.argv = was


@contextlib.contextmanager
def _importable(folders: list[str]) -> Iterator[None]:
    """These folders are on Python's path, after all others."""
    new = [folder for folder in folders if folder not in sys.path]
    sys.path += new
    try:
        yield
    finally:
        for folder in new:
            sys.path.remove(folder)


def _code(config: Config) -> dict[str, bytes]:
    """The modules that were loaded for the user's classes from folders that are not on Python's path, such as the one
    of the comparison file. What is on the path is installed, and must be so on the other machine too."""
    own = Path(protofed.__file__).parents[1]
    folders = [Path(folder) for folder in import_folders(config.own_parts) if folder not in sys.path]
    return {name: data for folder in folders if folder != own for name, data in loaded_from(folder).items()}
