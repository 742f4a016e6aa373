"""What pyproject.toml cannot say: the README as a package index shows it, which has none of the files beside it."""

import re
from pathlib import Path

from setuptools import setup


def description() -> str:
    """Return the README without the pictures, and with the paths of other pages as words instead of links."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(long_description=description(), long_description_content_type="text/markdown")
