"""What differs between the settings and the runtime that a run began with and those that it is resumed with."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from protofed.errors import BadInput
from protofed.runs.config.schema import field_names
from protofed.runs.observers import LoggingSettings
from protofed.runs.runtime_choice import RuntimeSettings

HARMLESS = (
    *("saving.on_error", "saving.keep"),
    *(f"runtime.{name}" for name in field_names(RuntimeSettings)),
    *(f"logging.{name}" for name in field_names(LoggingSettings)),
)
"""Settings that may differ. `refuse_other_runtime` compares what of the runtime changes numbers."""


def refuse_changes(then: str, now: str, allowed: Collection[str], where: str) -> bool:
    """Whether two configurations (TOML) differ in what matters. Raises BadInput if a difference is not allowed."""
    before, after = dict(flat(tomllib.loads(then))), dict(flat(tomllib.loads(now)))
    changed = [k for k in {**before, **after} if before.get(k) != after.get(k) and k not in HARMLESS]
    _refuse_other_privacy(before, after, changed, where)
    refused = [key for key in changed if not _is_allowed(key, allowed)]
    if refused:  # guard: other-settings
        lines = [f"  {key}: {before.get(key)!r} then, {after.get(key)!r} now" for key in refused]
        options = " ".join(f"--allow-config-change {key}" for key in refused)
        raise BadInput(
            "\n".join([f"{where} holds a run with another configuration:", *lines])
            + f"\nChoose another folder, or continue with the new configuration: {options}"
        )
    return bool(changed)


def _refuse_other_privacy(
    before: Mapping[str, Any], after: Mapping[str, Any], changed: Collection[str], where: str
) -> None:
    """What was sent so far was sent with the level and the noise of then: no later round makes up for that."""
    for key in ("privacy.level", "privacy.noise"):
        if key in changed and after.get("privacy.level", "none") != "none":  # guard: privacy-of-the-whole-run
            raise BadInput(
                f"{where} holds a run with {key} = {before.get(key)!r}, and this would be {after.get(key)!r}: what was "
                "sent already would not be what the run promises then. Choose another folder and start afresh"
            )


def refuse_other_runtime(then: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str], where: str) -> bool:
    """Whether the runtimes give other bits. Raises BadInput if that is not allowed. If a runtime was not recorded, only
    the hash in the checkpoint can tell."""
    keys = [key for key in {**then, **now} if key != "name"] if then and now else []
    changed = [key for key in keys if then.get(key) != now.get(key)]
    refused = [key for key in changed if not _is_allowed(f"runtime.{key}", allowed)]
    if refused:  # guard: other-runtime
        lines = [f"  {key}: {then.get(key)} then, {now.get(key)} now" for key in refused]
        raise BadInput(
            "\n".join([f"{where} was run on {_described(then)}, and this would be {_described(now)}:", *lines])
            + "\nThey do not give the same bits. Choose a [runtime] like the first one, start again in another folder, "
            f"or continue with other bits: --folder {where} --resume --allow-config-change runtime"
        )
    return bool(changed)


def _described(runtime: Mapping[str, Any]) -> str:
    name = f", runtime {runtime['name']}" if "name" in runtime else ""
    return f"{runtime.get('device')} ({runtime.get('precision')}{name})"


def _is_allowed(key: str, allowed: Collection[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in allowed)  # guard: section-not-prefix


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its whole name."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
