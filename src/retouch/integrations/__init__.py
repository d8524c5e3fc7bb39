"""Retouch's parts inside other trainers."""
