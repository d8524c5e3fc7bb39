"""The built-in world of small pictures in which every recipe has a twin: scenes, edits, instructions, tasks and an exact judge."""
