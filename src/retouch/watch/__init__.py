"""Detects reward hacking: scores held-out images with judges and measures that are not used for training, and raises alarms.

It may import ``assembly``, ``training``, ``records``, ``distributed``, ``recipe`` and the rewards. Alarms are pure functions of the
observations; only ``watcher`` samples and scores.
"""
