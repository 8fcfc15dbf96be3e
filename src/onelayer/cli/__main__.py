"""`python -m onelayer.cli`."""

from onelayer.cli import main

main()
