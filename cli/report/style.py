"""How a page looks, in light and dark, and what a browser may load for it: nothing."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1b1f24; --muted: #57606a; --line: #d0d7de;
  --panel: #f6f8fa; --amount: #0b63b5; --gap: #cf222e; --valid: #1a7f37; --inconclusive: #9a6700;
  --conflicts: #cf222e; --unknown: #818b98; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --muted: #9aa4af; --line: #3d444d;
  --panel: #151b23; --amount: #58a6ff; --gap: #ff7b72; --valid: #3fb950; --inconclusive: #d29922;
  --conflicts: #ff7b72; --unknown: #656c76; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .25rem 0; }
.muted, .axis, figcaption { color: var(--muted); font-size: .875rem; }
figure { margin: 1rem 0; }
.head { display: flex; justify-content: space-between; gap: 1rem; font-size: .875rem; margin-top: .5rem; }
.head span:last-child { color: var(--muted); text-align: right; }
.axis { display: flex; justify-content: space-between; gap: 1rem; font-variant-numeric: tabular-nums; }
svg { display: block; shape-rendering: crispEdges; width: 100%; background: var(--panel); }
svg.time { height: 4rem; }
svg.bar { height: .75rem; }
.amount { fill: var(--amount); }
.gap { fill: var(--gap); }
.valid { fill: var(--valid); }
.inconclusive { fill: var(--inconclusive); }
.conflicts { fill: var(--conflicts); }
.unknown { fill: var(--unknown); }
.divider { stroke: var(--ground); stroke-width: 2px; }
nav a { margin-right: 1rem; }
a { color: var(--amount); }
summary { cursor: pointer; padding: .5rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); }
.scroll:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--amount); }
table { border-collapse: collapse; font-size: .875rem; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--panel); white-space: nowrap; }
td { white-space: nowrap; }
td.long { white-space: normal; min-width: 18rem; max-width: 40rem; overflow-wrap: anywhere; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def content_policy() -> str:
    """The Content-Security-Policy: nothing but this style, from nowhere; no script, no form, no frame."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
