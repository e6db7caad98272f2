"""The store of a server: tables of rows and dense parameters. One thread at a time changes it.

``memory`` grows without copying; ``index`` finds rows by id; ``table`` is rows, their state, who
may come in and who must leave; ``updates`` applies rules; ``frozen`` is a table as it was.
"""
