"""The commands: what each takes, and a thin function that does it and imports what it needs only then: help loads no torch."""
