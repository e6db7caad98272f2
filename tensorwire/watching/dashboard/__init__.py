"""The page of a job: a small web server in one agent, and the page it serves.

``guard`` lets in only who has the token; ``connections`` bounds how many are open; ``answers`` puts
the job's state together once for all who ask; ``server`` answers; ``remote`` asks from elsewhere.
``static`` has the page and uPlot (MIT licence, beside it), which draws the charts. Nothing is
loaded from the network. Needs ``tensorwire[dashboard]``.
"""
