"""What differs between the configuration that a run was begun with and the one that it is resumed with."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from protofed.errors import BadInput

HARMLESS = ("runtime.workers", "saving.on_error")
"""Settings that change no result: how many processes, what happens when a save fails."""


def refuse_changes(then: str, now: str, allowed: Collection[str], where: str) -> bool:
    """Whether two configurations (TOML) differ in what decides a result; refused if that is not allowed."""
    before, after = dict(_flat(tomllib.loads(then))), dict(_flat(tomllib.loads(now)))
    changed = [k for k in {**before, **after} if before.get(k) != after.get(k) and k not in HARMLESS]
    refused = [key for key in changed if not _is_allowed(key, allowed)]
    if refused:  # guard: other-settings
        lines = [f"  {key}: {before.get(key)!r} then, {after.get(key)!r} now" for key in refused]
        options = " ".join(f"--allow-config-change {key}" for key in refused)
        raise BadInput(
            "\n".join([f"{where} holds a run with another configuration:", *lines])
            + f"\nChoose another folder, or go on with the new configuration: {options}"
        )
    return bool(changed)


def without_harmless(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide a result."""
    return {key: value for key, value in _flat(table) if key not in HARMLESS}


def _is_allowed(key: str, allowed: Collection[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in allowed)  # guard: section-not-prefix


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
