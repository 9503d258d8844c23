"""Elements of an HTML page, as a tree: texts are escaped when it is written, so none can become markup."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import TypeAlias

from cutline.cli.output.format import printable

Element: TypeAlias = ElementTree.Element
DOCTYPE = "<!DOCTYPE html>\n"


def element(tag: str, *children: Element | str, **attributes: str) -> Element:
    """An element. Names of attributes end in `_` where Python has the word, and have `_` for `-`."""
    found = ElementTree.Element(
        tag, {name.rstrip("_").replace("_", "-"): printable(value) for name, value in attributes.items()}
    )
    last: Element | None = None
    for child in children:
        if not isinstance(child, str):
            found.append(child)
            last = child
        elif last is None:
            found.text = (found.text or "") + printable(child)
        else:
            last.tail = (last.tail or "") + printable(child)
    return found


def html_of(root: Element) -> str:
    """The page as HTML."""
    return DOCTYPE + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
