"""The commands about rewards: scoring of images, judges, the ledger, votes and the reward server.

One file per command. Each may import every other package, but only inside the function of a command.
"""
