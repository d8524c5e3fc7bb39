"""Limits on the requests of a run to judges and reward servers: per minute and in total, for all processes of a machine together.

``quota`` limits requests per minute and in total, with counts in a file that processes share. ``event_loop`` serves the clients of
judges and of reward servers. May import ``records``.
"""
