"""Count the words of user pages, and how long their sentences are; code, tables and link targets do not count.

python docs/site/words.py                 # README.md and every page in docs/
python docs/site/words.py docs/plan.md    # some of them; exit code 1 if one has more than 900 words
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 900
LONG = 25
LEFT_OUT = {"how-we-know.md", "peers.md", "thirty-ways.md"}
"""Pages of evidence and reference, which may be longer and are not in the sum."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown page; a heading and an item of a list end one."""
    text = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\s*\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(#+ .*|!!! .*)$", r"\n\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    found = re.split(r"\n\s*\n|(?<=[.!?])[\"'*)`]*\s+", text)
    return [words for some in found if re.search(r"\w", words := " ".join(some.split()).strip("#*_ "))]


def main() -> int:
    """Print a line for each page, and return 1 if one is too long."""
    given = [Path(name) for name in sys.argv[1:]]
    pages = given or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    print(f"{'page':28}{'words':>7}{'sentences':>11}{'mean words':>12}{f'over {LONG}':>9}")
    total, too_long = 0, False
    for page in pages:
        counts = [len(sentence.split()) for sentence in sentences(page.read_text())]
        words = sum(counts)
        total += words if page.name not in LEFT_OUT else 0
        too_long |= words > MOST and page.name not in LEFT_OUT
        mean = words / max(1, len(counts))
        print(f"{page.name:28}{words:7,}{len(counts):11}{mean:12.1f}{sum(count > LONG for count in counts):9}")
    print(f"{'all but evidence':28}{total:7,}")
    return int(too_long)


if __name__ == "__main__":
    raise SystemExit(main())
