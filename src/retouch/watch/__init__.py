"""Watching for reward hacking: observes held-out images with judges and measures that do not train, and raises alarms.

It may import ``assembly``, ``training``, ``records``, ``distributed``, ``recipe`` and the rewards. Alarms are pure functions of
what was observed; only ``watcher`` samples and scores.
"""
