"""`python -m tuna` is `tuna`."""

from tuna.cli.main import main

main()
