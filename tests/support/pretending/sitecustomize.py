"""Python runs this file as it starts, in processes that `tests.support.pretended.environment` is for."""

from tests.support.pretended import install

install()
