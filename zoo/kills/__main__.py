"""`python -m zoo.kills`: the whole campaign."""

from zoo.kills.campaign import main

main()
