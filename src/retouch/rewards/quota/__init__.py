"""Limits on the requests of a run to judges and reward servers: per minute and in total, for all processes of a machine together.

``rate`` limits requests per minute, ``shared_numbers`` keeps the counts in a file, and ``quota`` combines both with a total budget.
``event_loop`` and ``line`` serve the clients of judges and of reward servers. Imports nothing of Retouch.
"""
