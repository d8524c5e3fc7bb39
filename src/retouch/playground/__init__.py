"""The built-in world of small images in which every recipe has a twin: scenes, edits, instructions, tasks and an exact judge."""
