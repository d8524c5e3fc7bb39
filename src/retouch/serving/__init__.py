"""Names under which scripts outside of this repository import modules of the reward server; the server itself is the wing
``retouch_serve``. Nothing in this repository may import this package.
"""
