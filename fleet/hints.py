"""What to do next, where several refusals have one answer. A hint names commands as they can be typed."""

from __future__ import annotations

# `init` first: a chain often ends by what also takes tables out of the publications. It is safe to repeat.
NEW_CHAIN = "run: snapshot init   then take a new full snapshot under another name: snapshot create NAME"
