"""Qwen-Image-2.1: its adapter, its class in a recipe and its published configuration. Imports `models.base` and `models.common`."""
