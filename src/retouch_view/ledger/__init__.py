"""``retouch ledger``: reads the ledgers of a run, compares columns with each other and with human ratings, scores images again, and
expels wrong scores.

``command`` dispatches; ``ledger_view`` reads the files; ``overview``, ``comparison``, ``rescoring`` and ``expelling`` compute the
results as JSON, and ``tables`` formats them. May import everything up to ``run``, which builds rewards. Only ``expelling``
writes into the ledger of a run.
"""
