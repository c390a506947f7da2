"""Small widgets that several subjects share.

Imports no subject of the app.
"""
