"""Rewards that come from human votes on pairs of images.

``log`` stores votes as lines of a file. ``queue`` has the groups of samples that wait for voters, and ``reward`` is the reward of
kind ``votes``, which reads their votes. ``bradley_terry`` finds strengths from votes, and ``calibration`` the win probabilities of
a judge's scores. They may import ``records.files`` and what other rewards may import, numpy and torch only inside functions.
"""
