"""The infrastructure of recipe sections, independent of what they describe: strict typed records, open sets of kinds, imports of
named classes, API keys, and error messages that name the key and what was probably meant.

This package knows no particular section of a recipe. It imports no other package of the project, and no torch.
"""
