"""Declarations of tables and dense groups: the same at each trainer and at each server.

``spec`` declares a table, ``dense_spec`` an optimizer's parameters; ``rules`` are the updates of
rows, ``initialisers`` their first values, ``lifetimes`` says which ids get a row and how long
they keep it; ``wire`` packs rows and gradients for a message; ``arguments`` checks what users give.
"""
