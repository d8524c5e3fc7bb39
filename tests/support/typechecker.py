"""What checks every annotation of the package while the tests run: beartype, to which an int is a float, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
