"""FLUX.2-klein: its adapter, its class in a recipe and its published configurations. Imports `models.base` and `models.common`."""
