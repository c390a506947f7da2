"""Campaigns that disturb a real window and its engine, and look at what is left.

Each is a program, such as `python -m tests.soak.window_kills --rounds 500 --seed 1`; tests run a
few rounds of it. `driven_window` is the window, `window` follows it, `ledger` knows what chats
there must be, `remains` finds processes and files that should be gone.
"""
