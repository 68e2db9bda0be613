"""`python -m cgmerge` is the command `cgmerge`."""

from cgmerge.cli.app import main

main()
