"""The retention rules, as `prune`, `init` and `watch` show them."""

from __future__ import annotations

from cutline.fleet.config import RULES, KeepCount, Retention
from cutline.fleet.units import duration_text

DEFAULT_NOTE = " (the default, because no rule is set)"


def rules_document(rules: Retention) -> dict[str, KeepCount | float | None]:
    """Return the rules that were applied; a rule that is not set is null, and `within` is in seconds."""
    return {name: rules.rules.get(name) for name in RULES}


def rules_text(rules: Retention) -> str:
    """Return the rules in one line: `last 2, daily 7`."""
    texts = {name: str(value) for name, value in rules.rules.items()}
    if rules.within_seconds is not None:
        texts["within"] = duration_text(rules.within_seconds)
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def retention_text(rules: Retention) -> str:
    """Return a line that says what the fleet's snapshots are pruned by."""
    note = "" if rules.rules else DEFAULT_NOTE
    return f"snapshot prune and snapshot watch keep: {rules_text(rules.or_default)}{note}"
