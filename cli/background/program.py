"""How a command starts `snapshot` again, in a process of its own: what follows the interpreter on its command line."""

from __future__ import annotations

# -P: the folder in which a command is typed is no place for its modules.
PROGRAM = ("-P", "-c", "from cutline.cli.entry import main; main()")
