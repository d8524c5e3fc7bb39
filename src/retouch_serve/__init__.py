"""Scores and samples over HTTP: the reward server, its client and wire format, and the engines that sample (vLLM, SGLang).

May import ``retouch`` and ``retouch_worlds``. ``front`` limits what a server accepts before it knows who asks.
"""
