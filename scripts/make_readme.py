"""python scripts/make_readme.py: put the generated files that README.md includes into it.

An include is a pair of lines, `<!-- include PATH -->` and `<!-- end -->`; what stands between them
is replaced by the file.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

from data.files import write_bytes

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"(<!-- include (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, root: Path) -> str:
    """The text with every include taken from the files under `root`."""
    return INCLUDE.sub(lambda found: found[1] + (root / found[2]).read_text(encoding="utf-8") + found[3], text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help, and nothing else
    readme = ROOT / "README.md"
    write_bytes(readme, filled(readme.read_text(encoding="utf-8"), ROOT).encode())
