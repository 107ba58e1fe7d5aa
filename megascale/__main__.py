"""`python -m megascale`: the same as the `megascale` command."""

from megascale.cli import main

main()
