"""The playground: its world, tasks, exact judges and models, the program that trains these models, and doubles for tests.

May import ``retouch`` only.
"""
