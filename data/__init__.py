"""Profile records: their schema, and the files that hold them."""
