"""Writes a folder for recipes/photos.jsonnet: ten photographs from scikit-image and scikit-learn, with instructions.

pip install scikit-image scikit-learn
python measurements/playground/photographs.py ten
"""

import argparse
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

PHOTOGRAPHS = (
    *(("skimage", f"data/{name}") for name in ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png")),
    *(("skimage", f"data/{name}") for name in ("motorcycle_left.png", "retina.jpg", "rocket.jpg")),
    *(("sklearn", f"datasets/images/{name}") for name in ("china.jpg", "flower.jpg")),
)
INSTRUCTIONS = (
    "make it black and white",
    "turn it into a monochrome photograph",
    "remove all colours",
    "make the picture grey",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the photographs and their metadata.jsonl")
    parser.add_argument("--prefix", default="", help="the first characters of every file name; other names are held out by a seed")
    chosen = parser.parse_args()
    folder = chosen.folder
    folder.mkdir(parents=True)
    for package, name in PHOTOGRAPHS:
        source = package_folder(package) / name
        shutil.copy(source, folder / f"{chosen.prefix}{source.name}")
    files = sorted(file.name for file in folder.iterdir())
    rows = [{"file_name": name, "instruction": instruction} for name in files for instruction in INSTRUCTIONS]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def package_folder(package: str) -> Path:
    """Find the folder of an installed package without importing the package."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed: pip install scikit-image scikit-learn")
    return Path(found.origin).parent


if __name__ == "__main__":
    main()
