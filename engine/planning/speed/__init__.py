"""Predicted speed: facts about devices and links, measured or looked up, and the speed model.

Imports no torch, nothing that holds weights, and no search code.
"""
