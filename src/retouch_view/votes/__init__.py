"""Rewards from human votes on pairs of images.

``log`` stores votes as lines of a file. ``queue`` stores the groups of images that wait for votes, and ``reward`` is the reward of
kind ``votes``, which reads the votes. ``bradley_terry`` estimates strengths from votes, and ``calibration`` maps a judge's scores
to win probabilities. Modules may import ``records.files`` and whatever other rewards may import; numpy and torch only inside
functions.
"""
