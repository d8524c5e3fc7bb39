"""Use of a trained policy: sampling, evaluation of a run or recipe, export, upload to the Hub, and encoding of data sets as image
tokens.

What a command does with a policy outside of training belongs here. This package may import ``run`` and every package below it.
"""
