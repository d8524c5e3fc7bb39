"""Will it run, where, and how long: ``retouch doctor``, and the dry run of a step on a fake accelerator.

May import ``retouch`` and the other wings; no package imports this one.
"""
