"""How a model is split: settings, figures, undo, predicted speed, and what fits.

Imports no other subject of the app.
"""
