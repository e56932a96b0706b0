"""Keys of recipes that have another name today. Recipes and run folders of older versions load by this table."""

from __future__ import annotations

from typing import Any

RENAMED: dict[str, str] = {
    "observe.memory": "observe.memory_step",
    "observe.tensorboard": "observe.tracker",
    "optim.skip_outliers": "faults.spike_limit",
}
"""{section.key of an older version: section.key today}."""
VALUES: dict[str, dict[bool, Any]] = {
    "observe.memory": {True: 2, False: 0},
    "observe.tensorboard": {True: "tensorboard", False: "none"},
}
"""Values of renamed keys that were others, too: true and false, and none else."""
IMPLIED: dict[str, tuple[str, Any]] = {"optim.skip_outliers": ("on_spike", "skip")}
"""What a renamed key that is not 0 also meant: a field of the same section today, with its value."""


ABSENT: dict[str, Any] = {"data.document_masks": False}
"""What the absence of a younger key means in a section that an older version wrote into a run folder."""
WRITTEN = {
    "data": {
        "source",
        "tokenizer",
        "val_fraction",
        "text_key",
        "max_bad_fraction",
        "max_epochs",
        "token_dtype",
    }
}
"""The keys of a section that every version writes there. A section with all of them was written, not typed."""


def migrate(table: dict[str, Any], origins: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a parsed recipe with today's keys, and `origins` (where each key was written) under the same keys. If a
    recipe has both names of a key, the old one stays and is reported as unknown."""
    moved = {section: dict(v) if isinstance(v, dict) else v for section, v in table.items()}
    origins = dict(origins)
    for old, new in RENAMED.items():
        (section, key), (home, name) = old.split("."), new.split(".")
        values = moved.get(section)
        if not isinstance(values, dict) or key not in values:
            continue
        target = moved.setdefault(home, {})
        if not isinstance(target, dict) or name in target or today(old, values[key])[0] == old:
            continue
        value = values.pop(key)
        _, target[name] = today(old, value)
        if old in IMPLIED and value:
            target.setdefault(*IMPLIED[old])
        if old in origins:
            origins[new] = origins.pop(old)
    for key, meant in ABSENT.items():
        section, name = key.split(".")
        values = moved.get(section)
        if isinstance(values, dict) and values.keys() >= WRITTEN[section]:
            values.setdefault(name, meant)
    return moved, origins


def today(key: str, value: Any) -> tuple[str, Any]:
    """An override's key and value, as they are called today. A value that the key never had stays, and is reported."""
    if key in VALUES and not isinstance(value, bool):  # 1.0 is equal to true
        return key, value
    return RENAMED.get(key, key), VALUES[key][value] if key in VALUES else value
