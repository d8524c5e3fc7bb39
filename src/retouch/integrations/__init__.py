"""Parts of Retouch for use in other trainers.

It may import everything except ``cli``, ``session`` and above; an extra of Retouch installs the trainer's package.
"""
