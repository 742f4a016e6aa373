"""Python runs this file as it starts, in processes that `tests.pretended.environment` is for."""

from tests.pretended import install

install()
