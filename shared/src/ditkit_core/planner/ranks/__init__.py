"""Plans for runs of several ranks: what each rank has, and what ranks exchange.

It imports what is next to it: memory, rates and times. Start reading at layout.py.
"""
