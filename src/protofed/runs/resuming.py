"""Whether a run folder holds the run that a configuration asks for."""

import tomllib
from pathlib import Path

from protofed.runs.config.config import Config
from protofed.runs.config.config_diff import refuse_changes, refuse_other_runtime
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.store.checkpoint import refuse_other_data
from protofed.runs.store.folder import RunFolder


def refuse_other_run(folder: RunFolder, config: Config, data_elsewhere: bool = False) -> None:
    """Refuses to show a finished run in place of one with other settings, another runtime or other data. Data elsewhere
    are not asked for."""
    then, where, environment = folder.read_config(), str(folder.path), folder.read_environment()
    refuse_run_of_old_version(tomllib.loads(then), environment, where)
    refuse_changes(then, config.toml(), (), where)
    refuse_other_runtime(environment.get("runtime", {}), config.runtime.numerics(), (), where)
    if not data_elsewhere:
        refuse_other_data(folder.checkpoints, config.identity)
    folder.warn_of_other_versions()


def refuse_run_of_other_runtime(config: Config, out: Path) -> None:
    """Refuses to resume if the run to resume was begun under a runtime that gives other bits. Its folder is named by
    another hash, so without this check a new run would start."""
    for path in sorted(out.iterdir()) if out.is_dir() else []:
        sibling = RunFolder(path)
        try:
            refuse_changes(sibling.read_config(), config.toml(), (), str(path))
            was = sibling.read_environment().get("runtime", {})
        except (OSError, ValueError):  # another experiment, or not a run folder
            continue
        refuse_other_runtime(was, config.runtime.numerics(), (), str(path))
