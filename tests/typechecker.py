"""The type checker behind jaxtyping's run-time checks: beartype, with python's convention that an int is a float."""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
