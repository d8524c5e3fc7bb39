"""Memory plans: the bytes of weights, gradients, optimizer states, caches and activations, from a model's configuration alone.

What sizes a model or one of its uses belongs here; which recipe leads to which plan is decided in `retouch.doctor`. It imports
`retouch.models` and `retouch.core`, and never reads weights.
"""
