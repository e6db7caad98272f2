"""A parameter-server job whose workers are killed, stopped and cut off, over and over.

``python -m chaos --help`` says how to run it, ``plan`` what is done to whom and when,
``worker`` what the victims do meanwhile, ``director`` does it, and ``judge`` says from
what the workers told whether the survivors went on as they should.
"""
