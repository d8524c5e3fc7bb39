"""The commands that use a run's folder after or during training: samples, exports, reports and the viewer.

One file per command. Each may import every other package, but only inside the function of a command.
"""
