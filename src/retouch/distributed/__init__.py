"""Support for several ranks and devices: process groups, steppers (optimizers), sharding, placement, and the launcher.

A stepper owns the backward pass, gradient reduction, clipping and the optimizer step of one run. This package may import ``types``,
``core``, ``policies.weights`` and ``recipe``; it knows neither the training loop nor any model family.
"""
