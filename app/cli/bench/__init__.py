"""`tandem bench`: speeds of a model, as a table, JSON or CSV."""
