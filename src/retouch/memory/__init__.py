"""Memory plans: the bytes of weights, gradients, optimizer states, caches and activations, from a model's configuration alone.

Code that computes the size of a model or of one of its uses belongs here; `retouch.doctor` decides which plan a recipe needs. This
package imports `retouch.models` and `retouch.core`, and never reads weights.
"""
