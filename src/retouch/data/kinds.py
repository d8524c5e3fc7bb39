"""The data sources that a recipe can select, one row per kind."""

from retouch.config.kinds import Kinds

DATA = Kinds(
    "data",
    {
        "folder": "retouch.data.sources.folder:FolderData",
        "hub": "retouch.data.sources.hub:HubData",
        "stream": "retouch.data.sources.stream:StreamData",
        "complex-edit": "retouch.data.sources.complex_edit:ComplexEditData",
        "triplets": "retouch.data.sources.triplets:TripletData",
        "prompts": "retouch.data.sources.prompts:PromptData",
        "table": "retouch.data.sources.table:TableData",
        "iterable": "retouch.data.sources.stream:IterableData",
        "tokens": "retouch.data.sources.tokens:TokenData",
    },
    renamed={"playground-paintings": "playground-scenes"},
    with_wings=True,
)
