"""The split of a model over devices: settings, figures, undo, predicted speed, and what fits.

Imports no other subject of the app.
"""
