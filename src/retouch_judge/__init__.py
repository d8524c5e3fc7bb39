"""Vision-language models as judges: what they are asked, how, at what cost, and whether they judge well (README.md).

Modules here may import the core and ``retouch_worlds``, and no other wing.
"""
