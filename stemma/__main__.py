"""`python -m stemma`: the command `stemma`, where its script is not on the PATH."""

from stemma.command import main

main()
