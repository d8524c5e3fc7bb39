"""What the commands' words are read with."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def numbers(text: str) -> list[int]:
    """ "1,2,3" as numbers."""
    return [int(part) for part in text.split(",")]
