"""``retouch ledger``: reads the ledgers of a run, compares columns with each other and with human ratings, and scores images again.

``command`` dispatches; ``ledger_view`` reads the files; ``overview``, ``comparison`` and ``rescoring`` compute the results as JSON,
and ``tables`` prints them. May import everything up to ``assembly``, which builds rewards; never writes into a run's own ledger.
"""
