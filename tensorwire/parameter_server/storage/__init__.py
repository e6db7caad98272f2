"""The store of a server: tables of rows and dense parameters. One thread at a time changes it.

``table`` is ids, who may come in and who must leave; ``row_store`` keeps their rows, in the host's
memory or on a device; ``updates`` applies rules; ``tables`` reads and moves several tables in one
go; ``dense`` keeps pieces of an optimizer; ``frozen`` is a table as it was.
"""
