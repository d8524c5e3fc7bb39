"""Limits on what a run may ask of judges and reward servers: per minute and in total, for all processes of a machine together.

``rate`` limits requests per minute, ``shared_numbers`` keeps the counts in a file, and ``quota`` combines both with a total budget.
Imports nothing of Retouch.
"""
